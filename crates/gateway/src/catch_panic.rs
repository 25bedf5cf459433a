//! A bug in one call fails that call, with an answer, and no other.
//!
//! Not tower-http's `CatchPanic`: its answers have a boxed body with erased errors, so that each frame of each answer
//! would pass one box more, and gRPC's status would have to be found again in the error.

use futures::FutureExt as _;
use k8e_api::status::to_status;
use k8e_model::Code;
use std::panic::AssertUnwindSafe;
use tonic::body::Body;
use tonic::codegen::http::Response;

/// The answer of a call; `INTERNAL` when the call panicked. For [`tower::util::MapFutureLayer`].
pub(crate) async fn catch_panic<E>(
    call: impl Future<Output = Result<Response<Body>, E>>,
) -> Result<Response<Body>, E> {
    // Nothing of the call is used again after a panic, so nothing half-done is seen.
    let answer = AssertUnwindSafe(call).catch_unwind().await;
    answer.unwrap_or_else(|_| {
        tracing::error!("a call panicked; the message is above");
        let status = to_status(
            Code::Internal,
            "a bug in k8e ended this call: see the server's log",
        );
        Ok(status.into_http())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::codegen::http::Request;
    use tower::util::MapFutureLayer;
    use tower::{Layer as _, Service as _, ServiceExt as _, service_fn};

    #[tokio::test]
    async fn a_panic_becomes_an_answer() {
        let service = service_fn(
            async |panics: Request<bool>| -> Result<Response<Body>, ()> {
                assert!(!panics.into_body(), "this panic is part of the test");
                Ok(Response::new(Body::empty()))
            },
        );
        let mut service = MapFutureLayer::new(catch_panic).layer(service);
        let mut call = async |panics| {
            let service = service.ready().await.unwrap();
            service.call(Request::new(panics)).await.unwrap()
        };
        let status = tonic::Status::from_header_map(call(true).await.headers()).unwrap();
        assert_eq!(status.code(), tonic::Code::Internal);
        assert!(status.message().contains("see the server's log"));
        assert!(tonic::Status::from_header_map(call(false).await.headers()).is_none());
    }
}
