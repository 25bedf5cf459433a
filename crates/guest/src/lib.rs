//! The guest agent inside a sandbox: executes commands, reads and writes files, lists processes.
//!
//! # Calls
//! A connection carries one call, at once or later: a `Request`, then `Input`s where the call has them. The guest
//! answers with `Reply`s, of which exactly one is final:
//!
//! | call | replies | final |
//! |---|---|---|
//! | `Hello` | | `HelloReply` |
//! | `Exec` | `Started`, then `stdout` and `stderr` | `Exited` |
//! | `ReadFile` | `FileInfo`, then `data` | `Done` |
//! | `WriteFile` | | `Done` |
//! | `ListFiles` | `FileList`s | `Done` |
//! | `Stat` | | `FileInfo` |
//! | `MakeDir`, `Move`, `Remove` | | `Done` |
//! | `WatchFiles` | `Watching`, then `FileEvents` | none but `Error` |
//! | `StatDisk` | | `DiskUse` |
//! | `ListProcesses` | `ProcessList`s | `Done` |
//! | `StartRun`, `AttachRun` | `Started`, then `stdout` and `stderr` | `Exited`, or `Done` for now |
//! | `EndRun`, `ForgetRun` | | `Done` |
//! | `CreateTerminal` | | `Started` |
//! | `AttachTerminal` | `Started`, then `data` | `Exited` |
//! | `WriteTerminal`, `ResizeTerminal`, `EndTerminal` | | `Done` |
//! | `InspectTerminal`, `SignalTerminal` | | `TerminalState` |
//! | `ListTerminals` | | `TerminalList` |
//! | `KillLargest` | | `Killed` |
//! | `SaveTree` | `TreeBegun`, then `TreeEntries` and `TreePieces` | `TreeDone` |
//! | `RestoreTree` | | `TreeDone` |
//! | `CloseListener` | | `Done` |
//! | `Forward` | `Connected`, then `data` and `end` | `Done` |
//!
//! Any call may end with `Error` instead, which is final too. When the host closes its sending
//! direction before that, the call is cancelled: a command and all it started is killed, a file
//! that was being replaced stays as it was. What `StartRun` and
//! `CreateTerminal` made is no part of a call. So a host keeps its `Inputs` until the final reply, also
//! for calls that take none.
//!
//! # One thread
//! The sandbox's limit of processes counts threads, and a fork bomb must not stop the guest. So
//! there is one thread, file calls are made in small pieces with a yield between them, and nothing
//! here needs a new process or thread except a command.

mod call;
mod disk;
mod end_processes;
mod error;
mod exec;
mod files;
mod forward;
mod listener;
mod oom;
mod process_limit;
mod processes;
mod procfs;
mod pty;
mod reaper;
mod runs;
mod sys;
mod tree;
mod users;
mod watch;

pub use listener::SocketNames;
pub use sys::{inherited_listener, process_limit, self_test};

use k8e_wire::proto::request::Call;
use k8e_wire::{HostEnd, WireError};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};

/// Limit of concurrent calls. The engine allows far fewer commands per session; the rest is for file calls.
/// More would only use up the memory of the sandbox.
const CONNECTIONS_MAX: usize = 512;

/// Delay after a failed accept: out of descriptors or memory, which is temporary.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Default of `started_held`: longer than most small commands take on Linux, too short to be noticed.
const STARTED_HELD: Duration = Duration::from_millis(2);

/// Configuration of the guest.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Whether this process is init of the sandbox and reaps every orphan. Otherwise it reaps only
    /// its own children.
    pub init: bool,
    /// Limit of open files (soft, hard) that commands get, where the guest raised its own.
    nofile: Option<(u64, u64)>,
    /// How long `Started` is delayed, to be sent with the next reply. Most commands have ended
    /// or written output by then, and the host is woken once, not while they need the CPU.
    pub started_held: Duration,
    /// Process limit that the kernel inside keeps without counting refusals; none where the host counts them.
    pub processes_max: Option<u64>,
}

/// The agent as a part of a program that is its own host: calls without a socket that other processes
/// could reach. The program is single-threaded, as [here](crate#one-thread).
#[derive(Clone)]
pub struct Agent(Arc<Guest>);

/// State shared by all calls.
pub(crate) struct Guest {
    pub(crate) config: Config,
    pub(crate) supervisors: reaper::Supervisors,
    /// Signals whose disposition is reset in commands.
    pub(crate) signals: Arc<[i32]>,
    /// /dev/null, the standard input of commands without input.
    pub(crate) dev_null: Option<OwnedFd>,
    /// Pre-forked supervisor for the next command.
    pub(crate) spare: exec::Spare,
    /// Streams of ended commands that background processes still write to.
    pub(crate) drains: AtomicUsize,
    /// Commands that outlive their connections.
    pub(crate) runs: runs::Runs,
    pub(crate) terminals: pty::Terminals,
    pub(crate) process_limit: process_limit::ProcessLimit,
    /// Read by what starts processes or writes files, written while a snapshot is taken.
    pub(crate) starts: tokio::sync::RwLock<()>,
    pub(crate) listener: listener::Listener,
    pub(crate) watches: watch::Counts,
}

// === impl Config ===

impl Config {
    /// For init of a sandbox: also allows the guest as many open files as its calls can need.
    pub fn for_init() -> Self {
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
        Self {
            init: true,
            nofile: sys::raise_nofile(),
            ..Self::default()
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            init: std::process::id() == 1,
            nofile: None,
            started_held: STARTED_HELD,
            processes_max: None,
        }
    }
}

/// Serves calls forever, or until the future is dropped. With `names` the host can have the socket closed for a
/// checkpoint, and bound again.
pub async fn serve(mut listener: UnixListener, mut names: Option<SocketNames>, config: Config) {
    let agent = Agent::new(config);
    exec::make_spare(&agent.0);
    let guest = &agent.0;
    loop {
        let accepted = tokio::select! {
            biased;
            closed = guest.listener.close_requested(), if names.is_some() => Err(closed),
            accepted = listener.accept() => Ok(accepted),
        };
        let accepted = match (accepted, &mut names) {
            (Err(closed), Some(names)) => {
                drop(listener);
                closed.send(()).ok();
                listener = names.bind_next().await;
                continue;
            }
            (Err(_), None) => continue,
            (Ok(accepted), _) => accepted,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // Over the limit the connection is closed at once; the host reports that.
        let Some(permit) = guest.listener.connection() else {
            continue;
        };
        let guest = Arc::clone(guest);
        tokio::spawn(async move {
            call::answer(&guest, stream).await;
            drop(permit);
        });
        // Yields first: the accept of the next connection is not urgent.
        tokio::task::yield_now().await;
    }
}

// === impl Agent ===

impl Agent {
    /// Starts to reap, as init. Signal handlers of this process are installed before: their dispositions are
    /// reset in commands.
    pub fn new(config: Config) -> Self {
        let guest = Arc::new(Guest {
            config,
            supervisors: reaper::Supervisors::default(),
            signals: sys::changed_signals().into(),
            dev_null: std::fs::File::open("/dev/null")
                .ok()
                .and_then(|file| exec::above(file.into()).ok()),
            spare: exec::Spare::default(),
            drains: AtomicUsize::new(0),
            runs: runs::Runs::default(),
            terminals: pty::Terminals::default(),
            process_limit: process_limit::ProcessLimit::new(config.processes_max),
            starts: tokio::sync::RwLock::new(()),
            listener: listener::Listener::new(CONNECTIONS_MAX),
            watches: watch::Counts::default(),
        });
        if config.init {
            tokio::spawn(reaper::reap_everything(Arc::clone(&guest)));
        }
        Self(guest)
    }

    /// Starts a call, as over a connection: its final reply ends it, dropping the host's end cancels it.
    pub async fn call(&self, call: Call) -> Result<HostEnd, WireError> {
        let (ours, theirs) = StdStream::pair().map_err(WireError::Io)?;
        theirs.set_nonblocking(true).map_err(WireError::Io)?;
        let theirs = UnixStream::from_std(theirs).map_err(WireError::Io)?;
        let guest = Arc::clone(&self.0);
        tokio::spawn(async move { call::answer(&guest, theirs).await });
        HostEnd::call(ours, call).await
    }
}
