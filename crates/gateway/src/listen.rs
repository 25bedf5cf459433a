//! Accepting connections, never more than a number of them at once.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::server::Connected;

/// No descriptors left, most likely: others must close theirs first.
const ACCEPT_FAILED_PAUSE: Duration = Duration::from_millis(50);

/// A listener that stops accepting while too many of its connections are open.
pub(crate) struct Bounded<L> {
    listener: L,
    room: Arc<Semaphore>,
}

/// A connection that makes room when it is closed.
pub(crate) struct Counted<S> {
    stream: S,
    _room: OwnedSemaphorePermit,
}

/// What accepts.
pub(crate) trait Accept: Send + Sync + 'static {
    /// What it gives.
    type Stream: Send;
    /// The next connection.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

// === impl Bounded ===

impl<L: Accept> Bounded<L> {
    pub(crate) fn new(listener: L, connections_max: usize) -> Self {
        Self {
            listener,
            room: Arc::new(Semaphore::new(connections_max)),
        }
    }

    /// The connections. Never ends and never fails.
    pub(crate) fn stream(
        self,
    ) -> impl futures::Stream<Item = io::Result<Counted<L::Stream>>> + Send {
        futures::stream::unfold(self, |this| async move {
            let room = Arc::clone(&this.room).acquire_owned().await.ok()?;
            loop {
                match this.listener.accept().await {
                    Ok(stream) => {
                        return Some((
                            Ok(Counted {
                                stream,
                                _room: room,
                            }),
                            this,
                        ));
                    }
                    Err(error) => {
                        tracing::warn!("cannot accept a connection: {error}");
                        tokio::time::sleep(ACCEPT_FAILED_PAUSE).await;
                    }
                }
            }
        })
    }
}

// === impl Accept ===

impl Accept for UnixListener {
    type Stream = UnixStream;
    async fn accept(&self) -> io::Result<UnixStream> {
        Self::accept(self).await.map(|(stream, _)| stream)
    }
}

impl Accept for TcpListener {
    type Stream = TcpStream;
    async fn accept(&self) -> io::Result<TcpStream> {
        let (stream, _) = Self::accept(self).await?;
        // Answers are small and waited for.
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

// === impl Counted ===

impl<S> Counted<S> {
    pub(crate) fn get_ref(&self) -> &S {
        &self.stream
    }
}

impl<S: Connected> Connected for Counted<S> {
    type ConnectInfo = S::ConnectInfo;
    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
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
