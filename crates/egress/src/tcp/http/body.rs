//! Bodies, as fast as the sandbox may be.

use crate::ward::Ward;
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// A body whose pieces wait until the sandbox's bandwidth allows them.
pub(super) struct Metered {
    body: Incoming,
    ward: Arc<Ward>,
    waiting: Option<Waiting>,
}

struct Waiting {
    frame: Option<Frame<Bytes>>,
    turn: Pin<Box<dyn Future<Output = ()> + Send + Sync>>,
}

// === impl Metered ===

impl Metered {
    pub(super) fn new(body: Incoming, ward: Arc<Ward>) -> Self {
        Self {
            body,
            ward,
            waiting: None,
        }
    }
}

impl Body for Metered {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        loop {
            if let Some(waiting) = &mut self.waiting {
                ready!(waiting.turn.as_mut().poll(context));
                let frame = waiting.frame.take();
                self.waiting = None;
                return Poll::Ready(frame.map(Ok));
            }
            let frame = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) if self.ward.bandwidth().is_some() => frame,
                other => return Poll::Ready(other),
            };
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            let ward = Arc::clone(&self.ward);
            self.waiting = Some(Waiting {
                frame: Some(frame),
                turn: Box::pin(async move {
                    if let Some(bandwidth) = ward.bandwidth() {
                        bandwidth.take(bytes).await;
                    }
                }),
            });
        }
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = self.body.size_hint();
        if let Some(Waiting { frame: Some(frame), .. }) = &self.waiting {
            let bytes = frame.data_ref().map_or(0, |data| data.len() as u64);
            hint = match hint.exact() {
                Some(exact) => SizeHint::with_exact(exact + bytes),
                None => SizeHint::default(),
            };
        }
        hint
    }
}
