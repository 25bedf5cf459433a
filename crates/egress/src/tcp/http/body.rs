//! Bodies, as fast as the sandbox may be.

use crate::ward::Ward;
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// A body that comes in pieces which wait until the sandbox's bandwidth allows them.
pub(super) struct Metered {
    body: Incoming,
    ward: Arc<Ward>,
    /// What was read and has not had its turn.
    rest: Bytes,
    turn: Option<Turn>,
}

struct Turn {
    piece: Bytes,
    wait: Pin<Box<dyn Future<Output = ()> + Send + Sync>>,
}

// === impl Metered ===

impl Metered {
    pub(super) fn new(body: Incoming, ward: Arc<Ward>) -> Self {
        Self {
            body,
            ward,
            rest: Bytes::new(),
            turn: None,
        }
    }

    /// Whether there is something that must wait.
    fn begin_turn(&mut self) -> bool {
        let Some(bandwidth) = self.ward.bandwidth() else {
            return false;
        };
        let bytes = self.rest.len().min(bandwidth.piece());
        if bytes == 0 {
            return false;
        }
        let ward = Arc::clone(&self.ward);
        self.turn = Some(Turn {
            piece: self.rest.split_to(bytes),
            wait: Box::pin(async move {
                if let Some(bandwidth) = ward.bandwidth() {
                    bandwidth.take(bytes).await;
                }
            }),
        });
        true
    }

    fn unsent(&self) -> usize {
        let waiting = self.turn.as_ref().map_or(0, |turn| turn.piece.len());
        waiting + self.rest.len()
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
            if let Some(turn) = &mut self.turn {
                ready!(turn.wait.as_mut().poll(context));
                let piece = std::mem::take(&mut turn.piece);
                self.turn = None;
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            if self.begin_turn() {
                continue;
            }
            let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
            if self.ward.bandwidth().is_none() {
                return Poll::Ready(frame);
            }
            match frame.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => self.rest = data,
                Some(Ok(Err(other))) => return Poll::Ready(Some(Ok(other))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.unsent() == 0 && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match (self.unsent() as u64, self.body.size_hint().exact()) {
            (unsent, Some(exact)) => SizeHint::with_exact(exact + unsent),
            (0, None) => self.body.size_hint(),
            (_, None) => SizeHint::default(),
        }
    }
}
