//! A bug in one call fails that call, with an answer, and no other.

use futures::FutureExt as _;
use futures::future::BoxFuture;
use k8e_api::status::to_status;
use k8e_model::Code;
use std::panic::AssertUnwindSafe;
use std::task::{Context, Poll};
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

/// Puts [`CatchPanic`] around a service.
#[derive(Clone, Copy)]
pub(crate) struct CatchPanicLayer;

/// Turns a panic of the inner service into an `Internal` answer.
#[derive(Clone)]
pub(crate) struct CatchPanic<S>(S);

// === impl CatchPanicLayer ===

impl<S> Layer<S> for CatchPanicLayer {
    type Service = CatchPanic<S>;
    fn layer(&self, inner: S) -> CatchPanic<S> {
        CatchPanic(inner)
    }
}

// === impl CatchPanic ===

impl<S, B> Service<Request<B>> for CatchPanic<S>
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
        // Nothing of the call is used again after a panic, so nothing half-done is seen.
        let answer = AssertUnwindSafe(self.0.call(request)).catch_unwind();
        Box::pin(async move {
            answer.await.unwrap_or_else(|_| {
                tracing::error!("a call panicked; the message is above");
                let status = to_status(
                    Code::Internal,
                    "a bug in k8e ended this call: see the server's log",
                );
                Ok(status.into_http())
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower::{ServiceExt as _, service_fn};

    #[tokio::test]
    async fn a_panic_becomes_an_answer() {
        let service = service_fn(
            async |panics: Request<bool>| -> Result<Response<Body>, ()> {
                assert!(!panics.into_body(), "this panic is part of the test");
                Ok(Response::new(Body::empty()))
            },
        );
        let mut service = CatchPanicLayer.layer(service);
        let answer = service
            .ready()
            .await
            .unwrap()
            .call(Request::new(true))
            .await
            .unwrap();
        let status = tonic::Status::from_header_map(answer.headers()).unwrap();
        assert_eq!(status.code(), tonic::Code::Internal);
        assert!(
            service
                .ready()
                .await
                .unwrap()
                .call(Request::new(false))
                .await
                .is_ok()
        );
    }
}
