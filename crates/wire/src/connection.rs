//! The two ends of a call, typed so that neither can say what only the other may.

use crate::frame::{self, FrameReader, FrameWriter, WireError};
use crate::proto::{Input, Reply, Request, input, reply, request};
use crate::{GUEST_FRAME_BYTES_MAX, HOST_FRAME_BYTES_MAX};
use bytes::{Buf as _, BytesMut};
use std::io::{ErrorKind, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream as StdStream;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// The host's end of one call.
#[derive(Debug)]
pub struct HostEnd {
    /// What the guest answers.
    pub replies: Replies,
    /// What the host sends after its request.
    pub inputs: Inputs,
}

/// Replies of the guest, in order.
#[derive(Debug)]
pub struct Replies(FrameReader<OwnedReadHalf>);

/// Inputs to the guest. Dropping it closes that direction.
#[derive(Debug)]
pub struct Inputs(FrameWriter<OwnedWriteHalf>);

/// The guest's end of one call.
#[derive(Debug)]
pub struct GuestEnd {
    /// What the host asks and sends.
    pub requests: Requests,
    /// What the guest answers.
    pub replies: ReplySink,
}

/// The request and the inputs of the host, in order.
#[derive(Debug)]
pub struct Requests(FrameReader<OwnedReadHalf>);

/// Where the guest answers.
#[derive(Debug)]
pub struct ReplySink(FrameWriter<OwnedWriteHalf>);

// === impl HostEnd ===

impl HostEnd {
    /// Starts a call on a fresh connection. What fits into the socket's buffer is sent right away:
    /// tokio would first wait to hear that there is room in it.
    pub async fn call(mut stream: StdStream, call: request::Call) -> Result<Self, WireError> {
        let mut request = BytesMut::new();
        frame::put(&mut request, &Request { call: Some(call) })?;
        stream.set_nonblocking(true).map_err(WireError::Io)?;
        match stream.write(&request) {
            Ok(sent) => request.advance(sent),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(WireError::Io(error)),
        }
        let stream = UnixStream::from_std(stream).map_err(WireError::Io)?;
        let (read, write) = stream.into_split();
        let mut writer = FrameWriter::with_held(write, request);
        writer.flush().await?;
        Ok(Self {
            replies: Replies(FrameReader::new(read, GUEST_FRAME_BYTES_MAX)),
            inputs: Inputs(writer),
        })
    }
}

// === impl Replies ===

impl Replies {
    /// The next reply. That the guest closed is an error: the last reply of a call says that it is the last.
    pub async fn next(&mut self) -> Result<reply::Reply, WireError> {
        let reply: Reply = self.0.next().await?.ok_or(WireError::Eof)?;
        reply.reply.ok_or(WireError::OutOfTurn("an empty reply"))
    }
}

// === impl Inputs ===

impl Inputs {
    /// Sends one input.
    pub async fn send(&mut self, input: input::Input) -> Result<(), WireError> {
        self.0.send(&Input { input: Some(input) }).await
    }
}

// === impl GuestEnd ===

impl GuestEnd {
    /// Takes a connection of the host's.
    pub fn new(stream: UnixStream) -> Self {
        let (read, write) = stream.into_split();
        Self {
            requests: Requests(FrameReader::new(read, HOST_FRAME_BYTES_MAX)),
            replies: ReplySink(FrameWriter::new(write)),
        }
    }
}

// === impl Requests ===

impl Requests {
    /// The request; none when the host closed without one.
    pub async fn request(&mut self) -> Result<Option<request::Call>, WireError> {
        let request: Option<Request> = self.0.next().await?;
        Ok(request.and_then(|request| request.call))
    }

    /// The next input; none when the host closed, which cancels the call. Cancel safe.
    pub async fn input(&mut self) -> Result<Option<input::Input>, WireError> {
        match self.0.next::<Input>().await? {
            None => Ok(None),
            Some(Input { input: Some(input) }) => Ok(Some(input)),
            Some(Input { input: None }) => Err(WireError::OutOfTurn("an empty input")),
        }
    }
}

impl AsFd for Requests {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_ref().as_fd()
    }
}

// === impl ReplySink ===

impl ReplySink {
    /// Sends one reply, and what was held before it.
    pub async fn send(&mut self, reply: reply::Reply) -> Result<(), WireError> {
        self.0.send(&Reply { reply: Some(reply) }).await
    }

    /// Keeps a reply to go with the next, or with [`Self::flush`].
    pub fn hold(&mut self, reply: reply::Reply) -> Result<(), WireError> {
        self.0.hold(&Reply { reply: Some(reply) })
    }

    /// Sends what is held.
    pub async fn flush(&mut self) -> Result<(), WireError> {
        self.0.flush().await
    }
}
