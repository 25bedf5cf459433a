//! Messages with file descriptors (SCM_RIGHTS) between server and launcher, over a socket pair (SOCK_SEQPACKET).

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Bytes of a message: a request with every path at its longest stays below.
pub(crate) const MESSAGE_BYTES_MAX: usize = 128 * 1024;

/// Descriptors of a message. A new sandbox has the most: the pidfd of its first process, five files of its
/// control group, and the four sockets of its gate. The kernel drops what is more.
const DESCRIPTORS_MAX: usize = 10;

/// One end. Whole messages, in order; when the peer dies, the stream ends.
#[derive(Debug)]
pub(crate) struct Channel(OwnedFd);

// === impl Channel ===

impl Channel {
    /// A socket pair; the second end is for the other process.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (a, b) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Self(a), b))
    }

    /// Sends a message. Blocks while the socket buffer is full.
    pub(crate) fn send<M: Serialize>(&self, message: &M, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(message, fds, SendFlags::NOSIGNAL)
    }

    /// Sends a message without blocking: fails when the socket buffer is full.
    pub(crate) fn send_now<M: Serialize>(
        &self,
        message: &M,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        self.send_with(message, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    fn send_with<M: Serialize>(
        &self,
        message: &M,
        fds: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> io::Result<()> {
        let data = serde_json::to_vec(message)?;
        if data.len() > MESSAGE_BYTES_MAX {
            return Err(io::Error::other("a message over its limit"));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::other("too many descriptors"));
        }
        rustix::net::sendmsg(&self.0, &[IoSlice::new(&data)], &mut ancillary, flags)?;
        Ok(())
    }

    /// The next message, or none when the peer has closed.
    pub(crate) fn receive<M: DeserializeOwned>(&self) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        let Some((data, fds)) = self.receive_bytes()? else {
            return Ok(None);
        };
        Ok(Some((serde_json::from_slice(&data)?, fds)))
    }

    /// The bytes of the next message, or none when the peer has closed.
    pub(crate) fn receive_bytes(&self) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        // Most are far below the maximum: clearing a maximal buffer costs more than asking for the length.
        let length = self.wait_for_message()?;
        let mut data = vec![0; length.clamp(1, MESSAGE_BYTES_MAX)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            match rustix::net::recvmsg(
                &self.0,
                &mut [IoSliceMut::new(&mut data)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::CONNRESET) => return Ok(None),
                done => break done?,
            }
        };
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.bytes == 0 {
            return Ok(None);
        }
        data.truncate(received.bytes);
        Ok(Some((data, fds)))
    }

    /// Waits for the next message without reading it; its length, 0 when the peer has closed.
    fn wait_for_message(&self) -> io::Result<usize> {
        loop {
            let nothing: &mut [u8] = &mut [];
            match rustix::net::recv(&self.0, nothing, RecvFlags::PEEK | RecvFlags::TRUNC) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::CONNRESET) => return Ok(0),
                Ok((_, length)) => return Ok(length),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl From<OwnedFd> for Channel {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_any_length_arrive_with_their_descriptors_until_the_end() {
        let (ours, theirs) = Channel::pair().unwrap();
        let theirs = Channel::from(theirs);
        let file = std::fs::File::open("/dev/null").unwrap();
        let fds = [file.as_fd(); DESCRIPTORS_MAX];
        for length in [0, 1, 1000, MESSAGE_BYTES_MAX - 2] {
            let message = "x".repeat(length);
            ours.send(&message, &fds).unwrap();
            let (read, came): (String, _) = theirs.receive().unwrap().unwrap();
            assert!(read == message, "{length}");
            assert_eq!(came.len(), DESCRIPTORS_MAX);
        }
        let longer = "x".repeat(MESSAGE_BYTES_MAX);
        ours.send(&longer, &[]).unwrap_err();
        drop(ours);
        assert!(theirs.receive_bytes().unwrap().is_none());
    }
}
