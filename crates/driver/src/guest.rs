//! Where a guest listens, and how to reach it.

use k8e_wire::proto::{Hello, reply, request};
use k8e_wire::{HostEnd, PROTOCOL, WireError};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::UnixStream;

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
        HostEnd::call(self.connect().await.map_err(WireError::Io)?, call).await
    }

    /// Asks the guest whether it is there and speaks our protocol.
    pub async fn hello(&self) -> Result<(), WireError> {
        let mut end = self.call(request::Call::Hello(Hello {})).await?;
        let reply::Reply::Hello(hello) = end.replies.next().await? else {
            return Err(WireError::OutOfTurn("no answer to hello"));
        };
        if hello.protocol == PROTOCOL {
            Ok(())
        } else {
            Err(WireError::OutOfTurn("another protocol version"))
        }
    }

    async fn connect(&self) -> io::Result<UnixStream> {
        match self {
            Self::Unix(path) => connect_unix(path).await,
        }
    }
}

async fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    let (_dir, short) = short(path)?;
    UnixStream::connect(short).await
}

/// Whether somebody takes connections there.
pub(crate) fn is_listening(path: &Path) -> io::Result<()> {
    let (_dir, short) = short(path)?;
    std::os::unix::net::UnixStream::connect(short).map(drop)
}

/// A socket's address holds 107 bytes; a data directory may be deeper. Going through the
/// directory's descriptor keeps the address short whatever the path.
fn short(path: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let dir = rustix::fs::open(
        dir,
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())).join(name);
    Ok((dir, short))
}
