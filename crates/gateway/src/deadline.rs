//! The deadline of a gRPC call: a call that is over it is answered with `DEADLINE_EXCEEDED`.
//!
//! tonic ends it too, but answers `CANCELLED`; a client whose own clock is a moment behind the server's would take that
//! for something else than its deadline. This timer starts before tonic's and is polled first, so it is always the one
//! that answers.

use futures::future::BoxFuture;
use k8e_api::status::to_status;
use k8e_model::Code;
use k8e_net::grpc_timeout;
use std::task::{Context, Poll};
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

/// Puts [`Deadline`] around a service.
#[derive(Clone, Copy)]
pub(crate) struct DeadlineLayer;

/// Ends calls at the deadline that their client gave (`grpc-timeout`).
#[derive(Clone)]
pub(crate) struct Deadline<S>(S);

// === impl DeadlineLayer ===

impl<S> Layer<S> for DeadlineLayer {
    type Service = Deadline<S>;
    fn layer(&self, inner: S) -> Deadline<S> {
        Deadline(inner)
    }
}

// === impl Deadline ===

impl<S, B> Service<Request<B>> for Deadline<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let limit = grpc_timeout::of(request.headers());
        let answer = self.0.call(request);
        if limit.is_none() {
            return Box::pin(answer);
        }
        let answer = grpc_timeout::within(limit, answer);
        Box::pin(async move {
            answer.await.unwrap_or_else(|_| {
                let status = to_status(Code::Timeout, "the deadline of the call passed");
                Ok(status.into_http())
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::Instant;
    use tower::{ServiceExt as _, service_fn};

    #[tokio::test(start_paused = true)]
    async fn a_call_over_its_deadline_is_answered_with_deadline_exceeded() {
        let never = service_fn(async |_: Request<()>| -> Result<Response<Body>, ()> {
            std::future::pending().await
        });
        let request = Request::builder()
            .header("grpc-timeout", "3S")
            .body(())
            .unwrap();
        let begun = Instant::now();
        let late = Deadline(never).oneshot(request).await.unwrap();
        assert_eq!(begun.elapsed(), Duration::from_secs(3));
        assert_eq!(late.headers()["grpc-status"], "4");
    }
}
