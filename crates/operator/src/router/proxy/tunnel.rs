//! Tunnel of an upgraded connection (WebSocket): copies bytes both ways until one end closes, or an idle timeout.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional};
use tokio::time::{Instant, sleep_until};

/// A stream that records when bytes last went through it.
struct ActivityTracked<S> {
    inner: S,
    last: Arc<Mutex<Instant>>,
}

/// Copies until one end closes or no bytes went either way for `idle`. `_until_closed` is dropped after that.
pub(super) async fn join<T: Send>(
    caller: OnUpgrade,
    sandbox: OnUpgrade,
    idle: Duration,
    _until_closed: T,
) {
    let Ok((caller, sandbox)) = tokio::try_join!(caller, sandbox) else {
        return;
    };
    let last = Arc::new(Mutex::new(Instant::now()));
    let mut caller = ActivityTracked {
        inner: TokioIo::new(caller),
        last: Arc::clone(&last),
    };
    let mut sandbox = TokioIo::new(sandbox);
    tokio::select! {
        _ = copy_bidirectional(&mut caller, &mut sandbox) => {}
        () = idle_for(&last, idle) => tracing::debug!("closed a tunnel that was idle for {idle:?}"),
    }
}

async fn idle_for(last: &Mutex<Instant>, idle: Duration) {
    loop {
        let until = *last.lock().unwrap_or_else(PoisonError::into_inner) + idle;
        if Instant::now() >= until {
            return;
        }
        sleep_until(until).await;
    }
}

// === impl ActivityTracked ===

impl<S> ActivityTracked<S> {
    fn record_activity<T>(&self, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if matches!(polled, Poll::Ready(Ok(_))) {
            *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        }
        polled
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ActivityTracked<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_read(context, buffer);
        self.record_activity(polled)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ActivityTracked<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.record_activity(polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}
