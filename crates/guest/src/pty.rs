//! Pseudo-terminals (PTY): a command on a PTY that outlives the connection that created it.
//!
//! # Design
//! The supervisor of the command leads the terminal's session and is never in its foreground group, so
//! it can always query the foreground process group: in gVisor no other process can. One task
//! reads the terminal into a ring buffer of its last output; a client that attaches reads the
//! ring buffer, then new output.
//!
//! # Guarantees
//! - A reader that keeps up gets every byte: the terminal is read no faster than the slowest reader.
//!   One that stalls is cut off after a timeout, with an error, unless the terminal was created for it.
//! - Without readers the command never blocks.
//! - Ending a terminal kills its process tree, also what left its session, while the command runs.
//!   When the command has exited by itself, its background processes live on.

mod end;
mod keys;
mod open;
mod output;
mod terminal;
mod waiting;

use crate::error::Error;
use crate::exec::{Child, Command, Report, Running, not_started};
use crate::runs::check_id;
use crate::{Guest, exec, sys};
use bytes::Bytes;
use k8e_wire::proto::{
    AttachTerminal, CreateTerminal, Done, EndTerminal, EnvVar, Exec, InspectTerminal,
    ResizeTerminal, SignalTerminal, Started, TerminalList, TerminalState, WriteTerminal,
    exec::Program, reply::Reply,
};
use k8e_wire::{CHUNK_BYTES, ReplySink};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use terminal::{Reader, Terminal};

/// Limit of terminals, ended ones included, as for `sandbox.v1` clients; ended ones are evicted.
const TERMINALS_MAX: usize = 64;

/// Highest signal number.
const SIGNAL_MAX: i32 = 64;

/// TERM of the command unless the request sets it.
const TERM: (&str, &str) = ("TERM", "xterm-256color");

/// Terminals by id; none while one is being created.
#[derive(Default)]
pub(crate) struct Terminals(Mutex<HashMap<String, Option<Arc<Terminal>>>>);

/// A reserved slot for a terminal that is being created; freed on drop.
struct Place<'a> {
    terminals: &'a Terminals,
    id: &'a str,
    taken: bool,
}

/// Creates a terminal; the final reply is `Started`.
pub(crate) async fn create(guest: &Arc<Guest>, request: CreateTerminal) -> Result<Reply, Error> {
    check_id(&request.id)?;
    let size = open::size(request.rows, request.cols)?;
    let call = checked(request.exec)?;
    let mut place = guest.terminals.place(&request.id)?;
    let (command, _) = Command::prepare(&call).await?;
    let command = Arc::new(command);
    let open::Pair { ours, slave } = open::open(size, &command.user)?;
    let begin_ns = sys::monotonic_ns();
    let Child {
        supervisor,
        pid,
        mut reports,
        ..
    } = exec::spawn_on(guest, &command, &slave)?;
    drop(slave);
    let running = Running::new(guest, supervisor, pid);
    match reports.next().await {
        Some(Report::Started) => {}
        Some(Report::Failed { stage, errno }) => {
            return Err(not_started(&command, &call.user, stage, errno));
        }
        Some(Report::Ended { .. } | Report::Foreground { .. }) | None => {
            let what = "its supervisor was killed before it could start".to_owned();
            return Err(Error::Exhausted(what));
        }
    }
    let pid = running.pid();
    let terminal = Terminal::new(
        request.id.clone(),
        pid,
        supervisor,
        size,
        ours,
        request.awaits_reader,
    );
    place.take(Arc::clone(&terminal));
    tokio::spawn(output::forward(terminal, reports, running, begin_ns));
    Ok(Reply::Started(Started { pid }))
}

/// Sends the ring buffer, new output, and the exit status.
pub(crate) async fn attach(
    guest: &Guest,
    replies: &mut ReplySink,
    request: AttachTerminal,
) -> Result<Reply, Error> {
    let terminal = guest.terminals.get(&request.id)?;
    let mut changed = terminal.changes();
    let reader = Reader::add(&terminal)?;
    let pid = terminal.pid;
    replies.send(Reply::Started(Started { pid })).await?;
    loop {
        changed.borrow_and_update();
        // Checked first: output from before the exit is in the ring buffer by then.
        let exited = terminal.exited();
        while let Some(data) = reader.next(CHUNK_BYTES)? {
            let read = data.len();
            replies.send(Reply::Data(Bytes::from(data))).await?;
            reader.took(read);
        }
        if let Some(exited) = exited {
            return Ok(Reply::Exited(exited));
        }
        // The sender is in the terminal, which is alive here.
        changed.changed().await.ok();
    }
}

/// Writes input to a terminal; the final reply has the number of bytes.
pub(crate) async fn write(guest: &Guest, request: WriteTerminal) -> Result<Reply, Error> {
    let terminal = guest.terminals.get(&request.id)?;
    let bytes = terminal.write(guest, &request.data).await;
    Ok(Reply::Done(Done {
        bytes: bytes as u64,
        truncated: false,
    }))
}

/// Resizes a terminal; the foreground process group gets SIGWINCH.
pub(crate) async fn resize(guest: &Guest, request: ResizeTerminal) -> Result<Reply, Error> {
    let terminal = guest.terminals.get(&request.id)?;
    let size = open::size(request.rows, request.cols)?;
    terminal.resize(guest, size).await?;
    Ok(Reply::Done(Done::default()))
}

/// The foreground process group, and whether it waits for input.
pub(crate) async fn inspect(guest: &Guest, request: InspectTerminal) -> Result<Reply, Error> {
    let terminal = guest.terminals.get(&request.id)?;
    let group = terminal.foreground(guest).await.unwrap_or(0);
    let mut state = terminal.describe();
    if state.exited.is_none() {
        state.foreground = group;
        state.input_waiting = waiting::waiting(group, terminal.path()).into();
    }
    Ok(Reply::Terminal(state))
}

/// Signals the foreground process group.
pub(crate) async fn signal(guest: &Guest, request: SignalTerminal) -> Result<Reply, Error> {
    let terminal = guest.terminals.get(&request.id)?;
    if !(1..=SIGNAL_MAX).contains(&request.signal) {
        let what = format!("signal {} does not exist", request.signal);
        return Err(Error::Invalid(what));
    }
    let group = terminal.foreground(guest).await.unwrap_or(0);
    if group <= 1 || terminal.exited().is_some() {
        let what = format!("terminal {:?} has no foreground process group", request.id);
        return Err(Error::Precondition(what));
    }
    sys::kill(-group, request.signal);
    Ok(Reply::Terminal(TerminalState {
        foreground: group,
        ..terminal.describe()
    }))
}

/// Ends a terminal with its process tree, and removes it.
pub(crate) async fn end(guest: &Arc<Guest>, request: EndTerminal) -> Result<Reply, Error> {
    let terminal = guest.terminals.get(&request.id)?;
    let grace = std::time::Duration::from_millis(request.grace_ms);
    terminal.stop_awaiting_reader();
    let ending = end::end(Arc::clone(guest), Arc::clone(&terminal), grace);
    // Completes also when the caller is dropped.
    tokio::spawn(ending).await.ok();
    guest.terminals.remove(&request.id);
    Ok(Reply::Done(Done::default()))
}

/// Lists all terminals.
pub(crate) fn list(guest: &Guest) -> Reply {
    let terminals = guest.terminals.map();
    let made = terminals.values().flatten();
    Reply::Terminals(TerminalList {
        terminals: made.map(|terminal| terminal.describe()).collect(),
    })
}

// === impl Terminals ===

impl Terminals {
    fn place<'a>(&'a self, id: &'a str) -> Result<Place<'a>, Error> {
        let mut terminals = self.map();
        if terminals.contains_key(id) {
            return Err(Error::Exists(format!("terminal {id:?}")));
        }
        if terminals.len() >= TERMINALS_MAX {
            let over = terminals.iter().filter_map(|(id, terminal)| {
                let ended = terminal.as_ref()?.ended_ns()?;
                Some((ended, id.clone()))
            });
            let Some((_, oldest)) = over.min() else {
                return Err(Error::Exhausted(format!(
                    "{TERMINALS_MAX} terminals are open, the maximum of a sandbox: end one"
                )));
            };
            terminals.remove(&oldest);
        }
        terminals.insert(id.to_owned(), None);
        Ok(Place {
            terminals: self,
            id,
            taken: false,
        })
    }

    fn get(&self, id: &str) -> Result<Arc<Terminal>, Error> {
        let found = self.map().get(id).cloned().flatten();
        found.ok_or_else(|| Error::NotFound(format!("terminal {id:?}")))
    }

    fn remove(&self, id: &str) {
        self.map().remove(id);
    }

    fn map(&self) -> MutexGuard<'_, HashMap<String, Option<Arc<Terminal>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Place ===

impl Place<'_> {
    fn take(&mut self, terminal: Arc<Terminal>) {
        self.taken = true;
        self.terminals
            .map()
            .insert(self.id.to_owned(), Some(terminal));
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.taken {
            self.terminals.remove(self.id);
        }
    }
}

/// Only a program: the file of a script would have to outlive the call.
fn checked(exec: Option<Exec>) -> Result<Exec, Error> {
    let Some(mut exec) = exec else {
        return Err(Error::Invalid("no command to run".to_owned()));
    };
    let Some(Program::Argv(_)) = &exec.program else {
        let what = "a terminal runs a program with its arguments";
        return Err(Error::Invalid(what.to_owned()));
    };
    let (name, value) = TERM;
    if !exec.env.iter().any(|known| known.name == name) {
        exec.env.push(EnvVar {
            name: Bytes::from_static(name.as_bytes()),
            value: Bytes::from_static(value.as_bytes()),
        });
    }
    Ok(exec)
}
