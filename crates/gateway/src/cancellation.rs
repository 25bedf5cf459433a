//! Cancellation: a request stream that its client cancelled, or that was cut by a disconnect, is an error and not an end.
//!
//! For tonic a cancelled request stream is one that ended, so a file whose upload was cancelled would be put in place with
//! what had come so far.

use http_body_util::BodyExt as _;
use tonic::body::Body;
use tonic::codegen::http::Request;
use tonic::{Code, Status};

/// Makes the stream of a request fail when its client cancels it.
pub(crate) fn fail_on_cancel(request: Request<Body>) -> Request<Body> {
    request.map(|body| Body::new(body.map_err(cancelled_is_an_error)))
}

/// Any code but `Cancelled` is an error to tonic. The client is gone and does not read it.
fn cancelled_is_an_error(status: Status) -> Status {
    if status.code() == Code::Cancelled {
        Status::unavailable("the client cancelled the call or disconnected")
    } else {
        status
    }
}
