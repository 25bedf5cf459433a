//! Rate-limited `AsyncRead` and `AsyncWrite` for hyper over a shared socket, which the proxy keeps: to
//! reset it, to detect errors, and to relay it after an upgrade.

use crate::sandbox_net::SandboxNet;
use crate::tcp::rate_limit::READ_COST;
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

/// One of several handles of a socket. Only one of them reads and writes at a time.
///
/// Reads are limited to the rate of the sandbox, so everything that hyper does with the bytes (small
/// chunks, heads, 1xx responses) is accounted for.
pub(super) struct MeteredIo {
    stream: Arc<TcpStream>,
    sandbox: Arc<SandboxNet>,
    /// Counts reads and writes, for the idle timeout.
    progress: Arc<AtomicU64>,
    /// The wait of the rate limit before the next read.
    waits: Option<Pin<Box<Sleep>>>,
}

// === impl MeteredIo ===

impl MeteredIo {
    pub(super) fn new(
        stream: Arc<TcpStream>,
        sandbox: Arc<SandboxNet>,
        progress: Arc<AtomicU64>,
    ) -> Self {
        Self {
            stream,
            sandbox,
            progress,
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
                    self.progress.fetch_add(1, Ordering::Relaxed);
                    return Poll::Ready(written);
                }
            }
        }
    }
}

impl AsyncRead for MeteredIo {
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
            let piece = self.sandbox.rate_limit().chunk_bytes_max();
            match self.stream.try_read_buf(&mut (&mut *buffer).limit(piece)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => {
                    self.progress.fetch_add(1, Ordering::Relaxed);
                    let paid_at = self
                        .sandbox
                        .rate_limit()
                        .reserve(*read.as_ref().unwrap_or(&0), READ_COST);
                    self.waits = paid_at.map(|at| Box::pin(sleep_until(at)));
                    return Poll::Ready(read.map(|_| ()));
                }
            }
        }
    }
}

impl AsyncWrite for MeteredIo {
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
