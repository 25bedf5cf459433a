//! An accepted connection and what belongs to it: the one wrapper of a stream that all listeners use.

use k8e_net::accept::ConnectionPermit;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::{Connected, UdsConnectInfo};

/// A stream, and what is kept for as long as it is open.
pub(crate) struct Connection<S, A> {
    pub(crate) stream: S,
    pub(crate) attached: A,
}

/// What a connection keeps: a permit, who its client is.
pub(crate) trait Attached: Unpin {
    /// Called before each read and write; an error closes the connection.
    fn check_open(&mut self, _context: &mut Context<'_>) -> io::Result<()> {
        Ok(())
    }
}

impl Attached for ConnectionPermit {}

// === impl Connection ===

impl Connected for Connection<UnixStream, ConnectionPermit> {
    type ConnectInfo = UdsConnectInfo;
    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl<S: AsyncRead + Unpin, A: Attached> AsyncRead for Connection<S, A> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.attached.check_open(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin, A: Attached> AsyncWrite for Connection<S, A> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.attached.check_open(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.attached.check_open(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
