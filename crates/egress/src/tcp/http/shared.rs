//! A socket that hyper uses and that we keep in our hands: to reset it, to see it break, to go on
//! with it after a switch of protocols.

use crate::tcp::pace::OF_READ;
use crate::ward::Ward;
use bytes::BufMut as _;
use rustix::net::Shutdown;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep_until};

/// One handle of several. Only one of them reads and writes at a time.
///
/// It reads as fast as the sandbox may be. Whatever hyper makes of what was read, bodies in small
/// pieces, heads or answers before the answer, has been paid for then.
pub(super) struct Shared {
    stream: Arc<TcpStream>,
    ward: Arc<Ward>,
    /// Counts what comes and goes, so that silence can be told.
    moved: Arc<AtomicU64>,
    /// Until when what was read has to be paid for.
    waits: Option<Pin<Box<Sleep>>>,
}

// === impl Shared ===

impl Shared {
    pub(super) fn new(stream: Arc<TcpStream>, ward: Arc<Ward>, moved: Arc<AtomicU64>) -> Self {
        Self {
            stream,
            ward,
            moved,
            waits: None,
        }
    }

    fn write(
        &self,
        context: &mut Context<'_>,
        mut write: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream.poll_write_ready(context))?;
            match write(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => {
                    self.moved.fetch_add(1, Ordering::Relaxed);
                    return Poll::Ready(written);
                }
            }
        }
    }
}

impl AsyncRead for Shared {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(wait) = &mut self.waits {
            ready!(wait.as_mut().poll(context));
            self.waits = None;
        }
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            let piece = self.ward.pace().piece();
            match self.stream.try_read_buf(&mut (&mut *buffer).limit(piece)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => {
                    self.moved.fetch_add(1, Ordering::Relaxed);
                    let paid_at = self.ward.pace().book(*read.as_ref().unwrap_or(&0), OF_READ);
                    self.waits = paid_at.map(|at| Box::pin(sleep_until(at)));
                    return Poll::Ready(read.map(|_| ()));
                }
            }
        }
    }
}

impl AsyncWrite for Shared {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(context, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(context, |stream| stream.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(rustix::net::shutdown(&*self.stream, Shutdown::Write)?))
    }
}
