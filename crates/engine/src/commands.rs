//! Kept commands: commands of a session that outlive the call that started them, with standard input, signals or a
//! terminal, and any number of readers. For clients whose protocol names a command by its process id (E2B).
//!
//! The server holds the connection to the guest, so such a command ends with the server; one that must not is a
//! background run. Output is delivered to the readers that are attached at that moment and is not kept.

use crate::sessions::Shared;
use crate::{Error, Run, RunEvent, RunInput, RunRequest, RunTarget, Sessions};
use crate::{TerminalEvent, TerminalRequest, TerminalStream};
use bytes::Bytes;
use k8e_model::{Code, Command, Principal, RunStatus, SessionId, TerminalId};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// How long the exit of a command can be asked for.
const EXIT_KEPT: Duration = Duration::from_secs(30);

/// Ended commands of one session that are kept: one that starts thousands loses the exits of the oldest.
const ENDED_MAX: usize = 256;

/// Events on their way to one reader. A reader that is slower than the command slows the command down, as a pipe does.
const EVENTS_MAX: usize = 16;

/// A reader that takes nothing for this long is cut off, so that the command goes on for the others.
const STALLED_MAX: Duration = Duration::from_secs(60);

/// Readers of one command at a time.
const READERS_MAX: usize = 32;

/// How long a signal waits behind standard input that the command does not read; SIGKILL then ends the run itself.
const SIGNAL_WITHIN: Duration = Duration::from_secs(2);

const SIGKILL: i32 = 9;

/// Request for a kept command.
#[derive(Clone, Debug)]
pub struct CommandStart {
    /// Session to start it in.
    pub session: SessionId,
    /// The command; without a timeout of its own it has none.
    pub command: Command,
    /// Rows and columns of its terminal; none gives it pipes.
    pub terminal: Option<(u16, u16)>,
    /// How it is described in listings.
    pub config: CommandConfig,
}

/// A command as its client described it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandConfig {
    /// The program.
    pub cmd: String,
    /// Its arguments, without the program.
    pub args: Vec<String>,
    /// Environment variables of this command.
    pub envs: BTreeMap<String, String>,
    /// Working directory, if one was given.
    pub cwd: Option<String>,
    /// Name that the client chose.
    pub tag: Option<String>,
}

/// A kept command in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandView {
    /// Process id inside the sandbox.
    pub pid: u32,
    /// Its description.
    pub config: CommandConfig,
}

/// Event of a kept command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandEvent {
    /// Bytes of its standard output.
    Stdout(Bytes),
    /// Bytes of its standard error.
    Stderr(Bytes),
    /// Bytes of its terminal.
    Terminal(Bytes),
    /// Last event: it ended.
    Exited(CommandExit),
    /// Last event: its end is not known, for this reason.
    Failed(Code, String),
}

/// How a kept command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandExit {
    /// 0 to 255; 128+n when signal n killed it.
    pub exit_code: i32,
    /// Signal that killed it; 0 when it exited by itself.
    pub signal: i32,
    /// Whether its timeout killed it.
    pub timed_out: bool,
}

/// Input of a kept command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandInput {
    /// Bytes for standard input.
    Stdin(Bytes),
    /// Bytes for the terminal.
    Terminal(Bytes),
}

/// Events of a kept command from now on. Dropping it does not end the command.
pub struct CommandStream {
    /// Process id inside the sandbox.
    pub pid: u32,
    events: mpsc::Receiver<CommandEvent>,
}

/// Registry of kept commands.
#[derive(Default)]
pub(crate) struct Commands(Mutex<HashMap<SessionId, HashMap<u32, Arc<Kept>>>>);

struct Kept {
    pid: u32,
    config: CommandConfig,
    input: Input,
    readers: Mutex<Readers>,
    /// Ends the run when a signal cannot be delivered.
    kill: Notify,
}

enum Input {
    Pipe(tokio::sync::Mutex<RunInput>),
    Terminal(TerminalId),
}

#[derive(Default)]
struct Readers {
    attached: Vec<mpsc::Sender<CommandEvent>>,
    /// The last event and its time, once there is one.
    end: Option<(Instant, CommandEvent)>,
}

// === impl Sessions ===

impl Sessions {
    /// Starts a command; the stream has all its output.
    pub async fn start_command(
        &self,
        who: &Principal,
        start: CommandStart,
    ) -> Result<CommandStream, Error> {
        let target = RunTarget::Existing(start.session.clone());
        let timeout = start.command.timeout.or(None);
        let mut command = start.command;
        command.timeout = timeout.into();
        let Some((rows, cols)) = start.terminal else {
            let request = RunRequest { target, command };
            let mut run = self.run(who, request).await?;
            let pid = started(&mut run).await?;
            let input = run.take_input().ok_or(Error::InputClosed("it has ended"))?;
            let input = Input::Pipe(tokio::sync::Mutex::new(input));
            let (kept, stream) = self.keep(&start.session, pid, start.config, input);
            tokio::spawn(follow_run(
                Arc::clone(&self.shared),
                start.session,
                kept,
                run,
            ));
            return Ok(stream);
        };
        let request = TerminalRequest {
            target,
            command,
            rows,
            cols,
        };
        let (view, _) = self.create_terminal(who, request).await?;
        let output = self.attach_terminal(who, &view.id).await?;
        let input = Input::Terminal(view.id.clone());
        let (kept, stream) = self.keep(&start.session, view.pid, start.config, input);
        let following = Following {
            sessions: self.clone(),
            who: who.clone(),
            terminal: view.id,
            timeout,
        };
        tokio::spawn(following.run(start.session, kept, output));
        Ok(stream)
    }

    /// Attaches to a command: what it writes from now on, and its exit.
    pub async fn connect_command(
        &self,
        who: &Principal,
        session: &SessionId,
        pid: u32,
    ) -> Result<CommandStream, Error> {
        self.kept(who, session, pid).await?.attach()
    }

    /// The commands of a session that have not ended, by process id.
    pub async fn list_commands(
        &self,
        who: &Principal,
        session: &SessionId,
    ) -> Result<Vec<CommandView>, Error> {
        self.live(who, session).await?;
        let commands = self.shared.commands.map();
        let of_session = commands.get(session).into_iter().flatten();
        let mut views: Vec<_> = of_session
            .filter(|(_, kept)| kept.readers().end.is_none())
            .map(|(pid, kept)| CommandView {
                pid: *pid,
                config: kept.config.clone(),
            })
            .collect();
        views.sort_by_key(|view| view.pid);
        Ok(views)
    }

    /// Sends input, with backpressure.
    pub async fn send_command_input(
        &self,
        who: &Principal,
        session: &SessionId,
        pid: u32,
        input: CommandInput,
    ) -> Result<(), Error> {
        let kept = self.running(who, session, pid).await?;
        match (&kept.input, input) {
            (Input::Pipe(pipe), CommandInput::Stdin(data)) => pipe.lock().await.data(data).await,
            (Input::Terminal(id), CommandInput::Terminal(data)) => {
                self.write_terminal(who, id, data).await
            }
            (Input::Pipe(_), CommandInput::Terminal(_)) => {
                Err(Error::InputClosed("it has no terminal"))
            }
            (Input::Terminal(_), CommandInput::Stdin(_)) => {
                Err(Error::InputClosed("it has a terminal instead"))
            }
        }
    }

    /// Ends the command's standard input. Ending it twice is no error.
    pub async fn close_command_input(
        &self,
        who: &Principal,
        session: &SessionId,
        pid: u32,
    ) -> Result<(), Error> {
        match &self.running(who, session, pid).await?.input {
            Input::Pipe(pipe) => {
                pipe.lock().await.end().await;
                Ok(())
            }
            Input::Terminal(_) => Err(Error::InputClosed("it has a terminal instead")),
        }
    }

    /// Sends a signal to the command and its group; a terminal is ended.
    pub async fn signal_command(
        &self,
        who: &Principal,
        session: &SessionId,
        pid: u32,
        signal: i32,
    ) -> Result<(), Error> {
        let kept = self.running(who, session, pid).await?;
        match &kept.input {
            Input::Pipe(pipe) => {
                let sent = async { pipe.lock().await.signal(signal).await };
                match timeout(SIGNAL_WITHIN, sent).await {
                    Ok(sent) => sent,
                    Err(_) if signal == SIGKILL => {
                        kept.kill.notify_one();
                        Ok(())
                    }
                    Err(_) => Err(Error::InputClosed("it does not read what was sent before")),
                }
            }
            Input::Terminal(id) => {
                let grace = (signal == SIGKILL).then_some(Duration::ZERO);
                self.destroy_terminal(who, id, grace).await
            }
        }
    }

    /// Changes the size of the command's terminal.
    pub async fn resize_command(
        &self,
        who: &Principal,
        session: &SessionId,
        pid: u32,
        size: (u16, u16),
    ) -> Result<(), Error> {
        match &self.running(who, session, pid).await?.input {
            Input::Terminal(id) => self.resize_terminal(who, id, size).await,
            Input::Pipe(_) => Err(Error::InputClosed("it has no terminal")),
        }
    }

    /// The process id of the command with this tag.
    pub async fn command_by_tag(
        &self,
        who: &Principal,
        session: &SessionId,
        tag: &str,
    ) -> Result<u32, Error> {
        let views = self.list_commands(who, session).await?;
        let tagged = |view: &&CommandView| view.config.tag.as_deref() == Some(tag);
        let found = views.iter().find(tagged).map(|view| view.pid);
        found.ok_or_else(|| Error::CommandNotFound(format!("with tag {tag:?}")))
    }

    fn keep(
        &self,
        session: &SessionId,
        pid: i32,
        config: CommandConfig,
        input: Input,
    ) -> (Arc<Kept>, CommandStream) {
        // The engine refuses process ids that are not positive.
        let pid = pid.unsigned_abs();
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let kept = Arc::new(Kept {
            pid,
            config,
            input,
            readers: Mutex::new(Readers {
                attached: vec![sender],
                end: None,
            }),
            kill: Notify::new(),
        });
        let mut commands = self.shared.commands.map();
        let of_session = commands.entry(session.clone()).or_default();
        of_session.insert(pid, Arc::clone(&kept));
        forget_oldest(of_session);
        (kept, CommandStream { pid, events })
    }

    async fn kept(
        &self,
        who: &Principal,
        session: &SessionId,
        pid: u32,
    ) -> Result<Arc<Kept>, Error> {
        self.live(who, session).await?.check_awake()?;
        let commands = self.shared.commands.map();
        let kept = commands.get(session).and_then(|all| all.get(&pid)).cloned();
        kept.ok_or_else(|| Error::CommandNotFound(format!("with pid {pid}")))
    }

    async fn running(
        &self,
        who: &Principal,
        session: &SessionId,
        pid: u32,
    ) -> Result<Arc<Kept>, Error> {
        let kept = self.kept(who, session, pid).await?;
        match kept.readers().end {
            None => Ok(Arc::clone(&kept)),
            Some(_) => Err(Error::CommandNotFound(format!("with pid {pid}"))),
        }
    }
}

/// Keeps the newest of the ended commands.
fn forget_oldest(commands: &mut HashMap<u32, Arc<Kept>>) {
    let ended = |kept: &Kept| kept.readers().end.as_ref().map(|(at, _)| *at);
    let mut all: Vec<(Instant, u32)> = commands
        .iter()
        .filter_map(|(pid, kept)| Some((ended(kept)?, *pid)))
        .collect();
    if all.len() > ENDED_MAX {
        all.sort_unstable();
        for (_, pid) in &all[..all.len() - ENDED_MAX] {
            commands.remove(pid);
        }
    }
}

/// The first event of every run.
async fn started(run: &mut Run) -> Result<i32, Error> {
    match run.next().await {
        Some(Ok(RunEvent::Started { pid })) => Ok(pid),
        Some(Err(error)) => Err(error),
        Some(Ok(_)) | None => Err(Error::InputClosed("it has ended")),
    }
}

/// Delivers the events of a run, to its end.
async fn follow_run(shared: Arc<Shared>, session: SessionId, kept: Arc<Kept>, mut run: Run) {
    let last = loop {
        let event = tokio::select! {
            event = run.next() => event,
            () = kept.kill.notified() => break killed(),
        };
        match event {
            Some(Ok(RunEvent::Stdout(data))) => kept.deliver(CommandEvent::Stdout(data)).await,
            Some(Ok(RunEvent::Stderr(data))) => kept.deliver(CommandEvent::Stderr(data)).await,
            Some(Ok(RunEvent::Started { .. })) => {}
            Some(Ok(RunEvent::Exited(outcome))) => {
                break CommandEvent::Exited(CommandExit {
                    exit_code: outcome.exit_code,
                    signal: outcome.signal,
                    timed_out: outcome.status == RunStatus::TimedOut,
                });
            }
            Some(Err(error)) => break CommandEvent::Failed(error.code(), error.to_string()),
            None => break CommandEvent::Failed(Code::Unavailable, "it has ended".to_owned()),
        }
    };
    // Kills what is left of it.
    drop(run);
    end(&shared, session, kept, last).await;
}

fn killed() -> CommandEvent {
    CommandEvent::Exited(CommandExit {
        exit_code: 128 + SIGKILL,
        signal: SIGKILL,
        timed_out: false,
    })
}

/// A terminal that is followed.
struct Following {
    sessions: Sessions,
    who: Principal,
    terminal: TerminalId,
    timeout: Option<Duration>,
}

// === impl Following ===

impl Following {
    async fn run(self, session: SessionId, kept: Arc<Kept>, mut output: TerminalStream) {
        let shared = Arc::clone(&self.sessions.shared);
        let deadline = self.timeout.map(|timeout| Instant::now() + timeout);
        let reached = async {
            match deadline {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(reached);
        let last = loop {
            let event = tokio::select! {
                event = output.next() => event,
                () = &mut reached => {
                    // One that has ended meanwhile needs no end.
                    self.destroy(Duration::ZERO).await;
                    let exit = CommandExit { exit_code: 128 + SIGKILL, signal: SIGKILL, timed_out: true };
                    break CommandEvent::Exited(exit);
                }
                () = shared.stopped() => {
                    break CommandEvent::Failed(Code::Unavailable, Error::Stopping.to_string());
                }
            };
            match event {
                Some(Ok(TerminalEvent::Data(data))) => {
                    kept.deliver(CommandEvent::Terminal(data)).await;
                }
                Some(Ok(TerminalEvent::Exited(exit))) => {
                    // Frees what the guest keeps of it.
                    self.destroy(Duration::ZERO).await;
                    break CommandEvent::Exited(CommandExit {
                        exit_code: exit.exit_code,
                        signal: exit.signal,
                        timed_out: false,
                    });
                }
                Some(Err(error)) => {
                    // Not found: it was destroyed, which is how its end is asked for.
                    break match error.code() == Code::NotFound {
                        true => killed(),
                        false => CommandEvent::Failed(error.code(), error.to_string()),
                    };
                }
                None => break killed(),
            }
        };
        drop(self);
        end(&shared, session, kept, last).await;
    }

    async fn destroy(&self, grace: Duration) {
        let ended = self
            .sessions
            .destroy_terminal(&self.who, &self.terminal, Some(grace));
        if let Err(error) = ended.await {
            tracing::debug!("a terminal that has ended: {error}");
        }
    }
}

/// Delivers the last event, and forgets the command after a while.
async fn end(shared: &Arc<Shared>, session: SessionId, kept: Arc<Kept>, last: CommandEvent) {
    let readers = {
        let mut readers = kept.readers();
        readers.end = Some((Instant::now(), last.clone()));
        std::mem::take(&mut readers.attached)
    };
    for reader in readers {
        let _ = timeout(STALLED_MAX, reader.send(last.clone())).await;
    }
    sleep(EXIT_KEPT).await;
    let mut commands = shared.commands.map();
    if let Some(of_session) = commands.get_mut(&session) {
        if of_session
            .get(&kept.pid)
            .is_some_and(|other| Arc::ptr_eq(other, &kept))
        {
            of_session.remove(&kept.pid);
        }
        if of_session.is_empty() {
            commands.remove(&session);
        }
    }
}

// === impl Commands ===

impl Commands {
    fn map(&self) -> MutexGuard<'_, HashMap<SessionId, HashMap<u32, Arc<Kept>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Kept ===

impl Kept {
    fn readers(&self) -> MutexGuard<'_, Readers> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attach(&self) -> Result<CommandStream, Error> {
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let mut readers = self.readers();
        readers.attached.retain(|reader| !reader.is_closed());
        match &readers.end {
            // There is room: the channel is new.
            Some((_, last)) => drop(sender.try_send(last.clone())),
            None if readers.attached.len() >= READERS_MAX => {
                return Err(Error::CommandReadersFull { max: READERS_MAX });
            }
            None => readers.attached.push(sender),
        }
        Ok(CommandStream {
            pid: self.pid,
            events,
        })
    }

    /// Sends an event to all that are attached. Those that are gone, or take nothing for too long, are detached.
    async fn deliver(&self, event: CommandEvent) {
        let readers = self.readers().attached.clone();
        for reader in readers {
            let sent = timeout(STALLED_MAX, reader.send(event.clone())).await;
            if !matches!(sent, Ok(Ok(()))) {
                let mut readers = self.readers();
                readers
                    .attached
                    .retain(|other| !other.same_channel(&reader));
            }
        }
    }
}

// === impl CommandStream ===

impl CommandStream {
    /// The next event; none after the last, or when this reader was too slow. Cancel safe.
    pub async fn next(&mut self) -> Option<CommandEvent> {
        self.events.recv().await
    }
}
