//! Streaming bodies of the proxy: a body with a deadline, and a body with a size limit. Nothing is buffered.

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::Response;
use hyper::body::{Body, Bytes, Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use tokio::time::{Instant, Sleep};

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// A type-erased body.
pub(super) type AnyBody = UnsyncBoxBody<Bytes, BoxError>;
pub(super) type BoxResponse = Response<AnyBody>;

/// Why a body was cut off.
#[derive(Debug, thiserror::Error)]
pub(super) enum BodyError {
    #[error("the request exceeded its timeout")]
    TooLong,
    #[error("the request body exceeds its size limit")]
    TooLarge,
}

/// A body that fails at a deadline. `at_end` is dropped at the end of the body, or with it.
pub(super) struct DeadlineBody<B, T> {
    inner: B,
    until: Pin<Box<Sleep>>,
    at_end: Option<T>,
}

/// A request body with a size limit.
pub(super) struct LimitedBody<B> {
    inner: B,
    left: u64,
    exceeded: Arc<AtomicBool>,
}

pub(super) fn full(text: String) -> AnyBody {
    let body = Full::new(Bytes::from(text));
    UnsyncBoxBody::new(body.map_err(|never| match never {}))
}

pub(super) fn empty() -> AnyBody {
    UnsyncBoxBody::new(Empty::new().map_err(|never| match never {}))
}

// === impl DeadlineBody ===

impl<B: Body, T> DeadlineBody<B, T> {
    pub(super) fn new(inner: B, until: Instant, at_end: T) -> Self {
        let at_end = (!inner.is_end_stream()).then_some(at_end);
        Self {
            inner,
            until: Box::pin(tokio::time::sleep_until(until)),
            at_end,
        }
    }
}

impl<B, T> Body for DeadlineBody<B, T>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
    T: Unpin,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.until.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(Err(BodyError::TooLong.into())));
        }
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(context));
        if frame.is_none() || self.inner.is_end_stream() {
            self.at_end = None;
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

// === impl LimitedBody ===

impl<B> LimitedBody<B> {
    /// `exceeded` becomes true when the body is larger than `bytes_max`.
    pub(super) fn new(inner: B, bytes_max: u64, exceeded: Arc<AtomicBool>) -> Self {
        Self {
            inner,
            left: bytes_max,
            exceeded,
        }
    }
}

impl<B> Body for LimitedBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(context));
        let bytes = match &frame {
            Some(Ok(frame)) => frame.data_ref().map_or(0, |data| data.len() as u64),
            Some(Err(_)) | None => 0,
        };
        match self.left.checked_sub(bytes) {
            Some(left) => self.left = left,
            None => {
                self.exceeded.store(true, Ordering::Relaxed);
                return Poll::Ready(Some(Err(BodyError::TooLarge.into())));
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
