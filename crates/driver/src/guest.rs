//! Address of a guest (Unix socket), and calls to it: a spare connection, retries with back-off.

use k8e_net::proc_fd::SocketPath;
use k8e_wire::proto::{
    Argv, CloseListener, Exec, Hello, KillLargest, Killed, StartRun, exec, reply, request,
};
use k8e_wire::{HostEnd, PROTOCOL, RateLimit, WireError};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Delay between the start of a call and the connection for the next one. By then most calls are over: accepting
/// a connection would slow down a command that runs.
const SPARE_AFTER: Duration = Duration::from_millis(50);

/// Back-off while a guest's listen queue is full: first pause, doubled each time, and the number of retries.
const BUSY_PAUSE: Duration = Duration::from_millis(2);
const BUSY_TRIES: u32 = 9;

/// How long a guest may refuse to close its socket because calls are open: some of the server's are about to end.
const CLOSE_WAIT: Duration = Duration::from_secs(2);
const CLOSE_PAUSE: Duration = Duration::from_millis(5);

/// Timeout of the commands of a trial of checkpoints, on a busy machine.
const TRIAL_WITHIN_MS: u64 = 60_000;

/// Why a guest did not close its socket.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CloseError {
    /// Calls are open; in the guest's words.
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// Address of a guest: the path of its Unix socket on the host. A clone is the same address.
#[derive(Clone, Debug)]
pub struct GuestAddress(Arc<Address>);

#[derive(Debug)]
struct Address {
    path: PathBuf,
    /// Spare connection that the guest has accepted already: the next call does not wait for accept.
    spare: Mutex<Option<UnixStream>>,
    /// Budget of host memory for replies, shared by all calls.
    rate_limit: Arc<RateLimit>,
}

// === impl GuestAddress ===

impl GuestAddress {
    /// The guest that listens at `path`.
    pub fn new(path: PathBuf) -> Self {
        let (spare, rate_limit) = (Mutex::default(), Arc::default());
        Self(Arc::new(Address {
            path,
            spare,
            rate_limit,
        }))
    }

    /// Starts a call: one connection, one request.
    ///
    /// This is the only place where a call is retried, and only while the guest cannot have received the request:
    /// - a spare connection that the guest has closed is replaced by a new one;
    /// - while the guest's listen queue is full (`EAGAIN`), connecting is retried with exponential back-off.
    ///
    /// After that a call is made once: a command must not run twice.
    pub async fn call(&self, call: request::Call) -> Result<HostEnd, WireError> {
        let spare = self.spare().take();
        self.connect_soon();
        if let Some(stream) = spare {
            match HostEnd::call(stream, call.clone()).await {
                // The guest closed it before it received a whole request. After any other failure it
                // may have one, and a call is made once.
                Err(WireError::Io(error)) if is_closed(&error) => {}
                started => return started.map(|end| end.rate_limited(&self.0.rate_limit)),
            }
        }
        let stream = self.connect_with_back_off().await.map_err(WireError::Io)?;
        let end = HostEnd::call(stream, call).await?;
        Ok(end.rate_limited(&self.0.rate_limit))
    }

    /// Connects; a full listen queue is waited for with exponential back-off.
    async fn connect_with_back_off(&self) -> io::Result<UnixStream> {
        let mut pause = BUSY_PAUSE;
        for _ in 0..BUSY_TRIES {
            match self.connect() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    tokio::time::sleep(pause).await;
                }
                connected => return connected,
            }
            pause *= 2;
        }
        self.connect()
    }

    /// Health check: whether the guest answers and has our protocol version.
    pub async fn hello(&self) -> Result<(), WireError> {
        self.greet(false).await?;
        self.connect_spare();
        Ok(())
    }

    /// Asks the guest for the number of processes in the sandbox, itself excluded.
    pub async fn count_processes(&self) -> Result<u32, WireError> {
        self.greet(true).await
    }

    /// Has the guest kill the largest processes, until their resident sets add up to that many bytes.
    pub(crate) async fn kill_largest(&self, bytes: u64) -> Result<Killed, WireError> {
        let call = request::Call::KillLargest(KillLargest { bytes });
        let mut end = self.call(call).await?;
        let reply::Reply::Killed(killed) = end.replies.next().await? else {
            return Err(WireError::OutOfTurn("no answer to a call to free memory"));
        };
        Ok(killed)
    }

    /// Has the guest close its socket for a checkpoint; waits for calls that are about to end.
    pub(crate) async fn close_listener(&self) -> Result<(), CloseError> {
        let deadline = tokio::time::Instant::now() + CLOSE_WAIT;
        loop {
            match self.try_close_listener().await {
                Err(CloseError::Refused(_)) if tokio::time::Instant::now() < deadline => {
                    tokio::time::sleep(CLOSE_PAUSE).await;
                }
                done => return done,
            }
        }
    }

    async fn try_close_listener(&self) -> Result<(), CloseError> {
        self.drop_spare();
        let stream = self.connect_with_back_off().await.map_err(WireError::Io)?;
        let call = request::Call::CloseListener(CloseListener {});
        let mut end = HostEnd::call(stream, call).await?;
        let closed = end.replies.next().await?;
        if let reply::Reply::Error(error) = closed {
            return Err(CloseError::Refused(error.message));
        }
        let reply::Reply::Done(_) = closed else {
            return Err(WireError::OutOfTurn("no answer to a call to close").into());
        };
        // The guest's end of this connection must be gone too.
        match tokio::time::timeout(CLOSE_WAIT, end.replies.next()).await {
            Ok(Err(_)) => Ok(()),
            _ => Err(WireError::OutOfTurn("it did not close the connection").into()),
        }
    }

    /// Closes the spare connection: one that was made while the guest did not listen is accepted by nobody, and a call on
    /// it would wait for ever.
    pub(crate) fn drop_spare(&self) {
        drop(self.spare().take());
    }

    /// Starts a process that holds an open file without a name, for a trial of checkpoints, and waits until it does.
    pub(crate) async fn hold_unlinked_file(&self) -> Result<(), WireError> {
        const HOLD: &str = "exec 3>held; rm held; echo kept >&3; >ready; sleep 600";
        const WAIT: &str = "until [ -e ready ]; do sleep 0.01; done";
        let exec = |script: &'static str| Exec {
            program: Some(exec::Program::Argv(Argv {
                args: ["/bin/sh", "-c", script].map(Into::into).into(),
            })),
            cwd: "/workspace".into(),
            timeout_ms: TRIAL_WITHIN_MS,
            ..Exec::default()
        };
        let failed = WireError::OutOfTurn("no process for the trial of checkpoints");
        let hold = request::Call::StartRun(StartRun {
            id: "trial".to_owned(),
            exec: Some(exec(HOLD)),
        });
        let mut end = self.call(hold).await?;
        let reply::Reply::Started(_) = end.replies.next().await? else {
            return Err(failed);
        };
        let mut end = self.call(request::Call::Exec(exec(WAIT))).await?;
        loop {
            let reply = end.replies.next().await?;
            if let reply::Reply::Exited(exited) = &reply
                && exited.exit_code == 0
            {
                return Ok(());
            }
            if let reply::Reply::Exited(_) | reply::Reply::Error(_) = reply {
                return Err(failed);
            }
        }
    }

    async fn greet(&self, count: bool) -> Result<u32, WireError> {
        let mut end = self.call(request::Call::Hello(Hello { count })).await?;
        let reply::Reply::Hello(hello) = end.replies.next().await? else {
            return Err(WireError::OutOfTurn("no answer to hello"));
        };
        if hello.protocol == PROTOCOL {
            Ok(hello.processes)
        } else {
            Err(WireError::OutOfTurn("another protocol version"))
        }
    }

    /// Opens the spare connection for the next call in the background.
    fn connect_soon(&self) {
        let own = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(SPARE_AFTER).await;
            own.connect_spare();
        });
    }

    /// Errors are ignored: then the next call connects by itself.
    fn connect_spare(&self) {
        let mut spare = self.spare();
        if spare.is_none() {
            *spare = self.connect().ok();
        }
    }

    fn spare(&self) -> MutexGuard<'_, Option<UnixStream>> {
        self.0.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connect(&self) -> io::Result<UnixStream> {
        connect(&self.0.path)
    }
}

fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), BrokenPipe | ConnectionReset)
}

/// Whether nobody listens on the socket any more. Does not wait.
pub(crate) fn is_refused(path: &Path) -> bool {
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    connect(path).err().is_some_and(refused)
}

/// Non-blocking: a full listen queue is an error at once.
fn connect(path: &Path) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let path = SocketPath::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path.as_ref())?)?;
    Ok(socket.into())
}

/// Whether a process listens on the socket.
pub(crate) fn is_listening(path: &Path) -> io::Result<()> {
    UnixStream::connect(SocketPath::new(path)?).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8e_wire::GuestEnd;
    use k8e_wire::proto::HelloReply;
    use tokio::net::UnixListener;

    /// Answers one call, on the next connection or on one that is there already.
    async fn answer(stream: tokio::net::UnixStream) {
        let mut end = GuestEnd::new(stream);
        let request = end.requests.request().await.unwrap();
        assert!(matches!(request, Some(request::Call::Hello(_))));
        let hello = HelloReply {
            protocol: PROTOCOL,
            ..HelloReply::default()
        };
        end.replies.send(reply::Reply::Hello(hello)).await.unwrap();
    }

    #[tokio::test]
    async fn the_next_call_has_its_connection_and_does_without_when_that_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("guest.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let address = GuestAddress::new(path);
        let accept = async || listener.accept().await.unwrap().0;
        let (greeted, ()) = tokio::join!(address.hello(), async { answer(accept().await).await });
        greeted.unwrap();
        // Made before there is a call for it, and used by the next one.
        let spare = accept().await;
        let (greeted, ()) = tokio::join!(address.hello(), answer(spare));
        greeted.unwrap();
        // Cut before there is a call: the next one connects anew.
        drop(accept().await);
        let (greeted, ()) = tokio::join!(address.hello(), async { answer(accept().await).await });
        greeted.unwrap();
    }
}
