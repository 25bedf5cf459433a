//! What both ends say once they have switched to another protocol: bytes, both ways, while there are any.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional};
use tokio::time::{Instant, sleep_until};

/// One end, and when something was last said there.
struct Watched<S> {
    inner: S,
    last: Arc<Mutex<Instant>>,
}

/// Carries it until one end is closed, or nothing was said for `idle`. `_held` lives as long.
pub(super) async fn join<T: Send>(caller: OnUpgrade, sandbox: OnUpgrade, idle: Duration, _held: T) {
    let Ok((caller, sandbox)) = tokio::try_join!(caller, sandbox) else {
        return;
    };
    let last = Arc::new(Mutex::new(Instant::now()));
    let mut caller = Watched {
        inner: TokioIo::new(caller),
        last: Arc::clone(&last),
    };
    let mut sandbox = TokioIo::new(sandbox);
    tokio::select! {
        _ = copy_bidirectional(&mut caller, &mut sandbox) => {}
        () = silence(&last, idle) => tracing::debug!("closed a tunnel in which nothing was said for {idle:?}"),
    }
}

async fn silence(last: &Mutex<Instant>, idle: Duration) {
    loop {
        let until = *last.lock().unwrap_or_else(PoisonError::into_inner) + idle;
        if Instant::now() >= until {
            return;
        }
        sleep_until(until).await;
    }
}

// === impl Watched ===

impl<S> Watched<S> {
    fn heard<T>(&self, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if matches!(polled, Poll::Ready(Ok(_))) {
            *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        }
        polled
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_read(context, buffer);
        self.heard(polled)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.heard(polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}
