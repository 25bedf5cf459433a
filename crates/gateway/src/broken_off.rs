//! A call that its client broke off must not look like one that it finished.
//!
//! For tonic a request that was cancelled is one that ended, so a file whose upload was broken off
//! would be put in place as far as it came.

use http_body_util::BodyExt as _;
use tonic::body::Body;
use tonic::codegen::http::Request;
use tonic::{Code, Status};

/// Makes the stream of a request fail when its client cancels it.
pub(crate) fn told(request: Request<Body>) -> Request<Body> {
    request.map(|body| Body::new(body.map_err(not_the_end)))
}

/// Any code but `Cancelled` is an error to tonic. The client is gone, so nobody reads this.
fn not_the_end(status: Status) -> Status {
    if status.code() == Code::Cancelled {
        Status::unavailable("the client broke off the call")
    } else {
        status
    }
}
