//! Where a guest listens, and how to reach it.

use k8e_wire::proto::{Hello, reply, request};
use k8e_wire::{HostEnd, PROTOCOL, WireError};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where a guest listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestAddress {
    /// A Unix socket, by its path on the host.
    Unix(Arc<PathBuf>),
}

// === impl GuestAddress ===

impl GuestAddress {
    /// Starts a call: one connection, one request.
    pub async fn call(&self, call: request::Call) -> Result<HostEnd, WireError> {
        HostEnd::call(self.connect().map_err(WireError::Io)?, call).await
    }

    /// Asks the guest whether it is there and speaks our protocol.
    pub async fn hello(&self) -> Result<(), WireError> {
        self.greet(false).await.map(drop)
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

    /// Never blocks: a guest whose queue is full is an error at once.
    fn connect(&self) -> io::Result<UnixStream> {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
        let Self::Unix(path) = self;
        let (_dir, short) = short(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(&short)?)?;
        Ok(socket.into())
    }
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
