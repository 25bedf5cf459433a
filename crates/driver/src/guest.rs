//! Where a guest listens, and how to reach it.

use k8e_wire::proto::{Hello, reply, request};
use k8e_wire::{HostEnd, PROTOCOL, WireError};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// So long after a call began the connection for the next one is made. By then most are over: to take a
/// connection would slow down a command that runs.
const SPARE_AFTER: Duration = Duration::from_millis(50);

/// Where a guest listens: a Unix socket, by its path on the host. A clone is the same address.
#[derive(Clone, Debug)]
pub struct GuestAddress(Arc<Address>);

#[derive(Debug)]
struct Address {
    path: PathBuf,
    /// A connection without a call, which its guest has taken already: no call has to wait for that.
    spare: Mutex<Option<UnixStream>>,
}

// === impl GuestAddress ===

impl GuestAddress {
    /// The guest that listens at `path`.
    pub fn new(path: PathBuf) -> Self {
        let spare = Mutex::default();
        Self(Arc::new(Address { path, spare }))
    }

    /// Starts a call: one connection, one request.
    pub async fn call(&self, call: request::Call) -> Result<HostEnd, WireError> {
        let spare = self.spare().take();
        self.connect_soon();
        if let Some(stream) = spare {
            match HostEnd::call(stream, call.clone()).await {
                // The guest let go of it before it had a whole request. After any other failure it
                // may have one, and a call is made once.
                Err(WireError::Io(error)) if is_closed(&error) => {}
                started => return started,
            }
        }
        HostEnd::call(self.connect().map_err(WireError::Io)?, call).await
    }

    /// Asks the guest whether it is there and speaks our protocol.
    pub async fn hello(&self) -> Result<(), WireError> {
        self.greet(false).await?;
        self.connect_spare();
        Ok(())
    }

    /// Asks the guest how many processes there are beside it.
    pub async fn count_processes(&self) -> Result<u32, WireError> {
        self.greet(true).await
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

    /// Has a connection made for the next call, when this one is under way.
    fn connect_soon(&self) {
        let own = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(SPARE_AFTER).await;
            own.connect_spare();
        });
    }

    /// Failing is fine: the next call connects itself.
    fn connect_spare(&self) {
        let mut spare = self.spare();
        if spare.is_none() {
            *spare = self.connect().ok();
        }
    }

    fn spare(&self) -> MutexGuard<'_, Option<UnixStream>> {
        self.0.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never blocks: a guest whose queue is full is an error at once.
    fn connect(&self) -> io::Result<UnixStream> {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
        let (_dir, short) = short(&self.0.path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(&short)?)?;
        Ok(socket.into())
    }
}

fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), BrokenPipe | ConnectionReset)
}

/// Whether somebody takes connections there.
pub(crate) fn is_listening(path: &Path) -> io::Result<()> {
    let (_dir, short) = short(path)?;
    UnixStream::connect(short).map(drop)
}

/// What a socket's address holds.
const ADDRESS_BYTES_MAX: usize = 107;

/// A data directory may be deeper than an address is long. Going through the directory's descriptor
/// keeps the address short whatever the path; the descriptor must stay open.
fn short(path: &Path) -> io::Result<(Option<OwnedFd>, PathBuf)> {
    if path.as_os_str().len() <= ADDRESS_BYTES_MAX {
        return Ok((None, path.to_owned()));
    }
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let dir = rustix::fs::open(
        dir,
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())).join(name);
    Ok((Some(dir), short))
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
