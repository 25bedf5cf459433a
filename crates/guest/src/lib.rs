//! The agent inside a sandbox: runs commands, reads and writes files, lists processes.
//!
//! # Calls
//! A connection carries one call, at once or later: a `Request`, then `Input`s where the call takes them. The guest
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
//! | `ListProcesses` | `ProcessList`s | `Done` |
//! | `StartRun`, `AttachRun` | `Started`, then `stdout` and `stderr` | `Exited`, or `Done` for now |
//! | `EndRun`, `ForgetRun` | | `Done` |
//! | `CreateTerminal` | | `Started` |
//! | `AttachTerminal` | `Started`, then `data` | `Exited` |
//! | `WriteTerminal`, `ResizeTerminal`, `EndTerminal` | | `Done` |
//! | `InspectTerminal`, `SignalTerminal` | | `TerminalState` |
//! | `ListTerminals` | | `TerminalList` |
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
mod error;
mod exec;
mod files;
mod forward;
mod processes;
mod procfs;
mod pty;
mod reaper;
mod runs;
mod sweep;
mod sys;
mod users;

pub use sys::{inherited_listener, self_test};

use k8e_wire::proto::request::Call;
use k8e_wire::{HostEnd, WireError};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// Calls at once. The engine allows far fewer commands a session; the rest is room for file calls.
/// More would only use up the memory of the sandbox.
const CONNECTIONS_MAX: usize = 512;

/// Pause after a failed accept: out of descriptors or memory, which passes.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Longer than most small commands take on Linux, shorter than anybody notices.
const STARTED_HELD: Duration = Duration::from_millis(2);

/// How the guest runs.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Whether this process is init of the sandbox and reaps every orphan. Otherwise it reaps only
    /// its own children.
    pub init: bool,
    /// Limit of open files (soft, hard) that commands get, where the guest raised its own.
    nofile: Option<(u64, u64)>,
    /// How long the news that a command started waits for what comes next. Most commands have ended
    /// or said something by then, and the host is woken once, not while they need the CPU.
    pub started_held: Duration,
}

/// The agent as a part of a program that is its own host: calls without a socket in between that
/// anybody else could reach. Its program has one thread, as [here](crate#one-thread).
#[derive(Clone)]
pub struct Agent(Arc<Guest>);

/// What all calls share.
pub(crate) struct Guest {
    pub(crate) config: Config,
    pub(crate) supervisors: reaper::Supervisors,
    /// Signals that commands must get reset.
    pub(crate) signals: Arc<[i32]>,
    /// What commands without input read.
    pub(crate) dev_null: Option<OwnedFd>,
    /// All that the next command needs.
    pub(crate) spare: exec::Spare,
    /// Streams of ended commands that background processes still write to.
    pub(crate) drains: AtomicUsize,
    /// Commands that outlive their connections.
    pub(crate) runs: runs::Runs,
    pub(crate) terminals: pty::Terminals,
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
        }
    }
}

/// Serves calls until the end of time, or until the future is dropped.
pub async fn serve(listener: UnixListener, config: Config) {
    let agent = Agent::new(config);
    exec::make_spare(&agent.0);
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // Over the bound the connection closes at once; the host sees that and says so.
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
            continue;
        };
        let guest = Arc::clone(&agent.0);
        tokio::spawn(async move {
            call::answer(&guest, stream).await;
            drop(permit);
        });
        // Its turn first: that there is no other connection is not urgent.
        tokio::task::yield_now().await;
    }
}

// === impl Agent ===

impl Agent {
    /// Starts to reap, as init. Signals that this process handles are handled by now: commands get
    /// those reset.
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
