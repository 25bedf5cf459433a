//! Error responses of the router itself, as JSON or as a gRPC status.

use super::body::{BoxResponse, empty, full};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use std::borrow::Cow;

/// An error response: HTTP status, and the `detail` that clients show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    status: StatusCode,
    detail: Cow<'static, str>,
}

// === impl Refusal ===

impl Refusal {
    pub(super) fn new(status: StatusCode, detail: impl Into<Cow<'static, str>>) -> Self {
        Self {
            status,
            detail: detail.into(),
        }
    }

    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    #[cfg(test)]
    pub(super) fn detail(&self) -> &str {
        &self.detail
    }

    /// The response: JSON, or for gRPC clients, which ignore the body, a gRPC status.
    pub(super) fn answer(&self, grpc: bool) -> BoxResponse {
        if grpc { self.grpc() } else { self.json() }
    }

    fn json(&self) -> BoxResponse {
        let body = serde_json::json!({ "detail": self.detail }).to_string();
        let mut answer = Response::new(full(body));
        *answer.status_mut() = self.status;
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            headers.insert(hyper::header::WWW_AUTHENTICATE, scheme);
        }
        answer
    }

    fn grpc(&self) -> BoxResponse {
        let mut answer = Response::new(empty());
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(
            "grpc-status",
            HeaderValue::from_static(grpc_status(self.status)),
        );
        if let Ok(message) = HeaderValue::from_str(&percent_encoded(&self.detail)) {
            headers.insert("grpc-message", message);
        }
        answer
    }
}

/// The gRPC status code for an HTTP status.
fn grpc_status(status: StatusCode) -> &'static str {
    match status.as_u16() {
        400 => "3",        // INVALID_ARGUMENT
        401 => "16",       // UNAUTHENTICATED
        403 => "7",        // PERMISSION_DENIED
        413 => "8",        // RESOURCE_EXHAUSTED
        405 => "12",       // UNIMPLEMENTED
        502 | 503 => "14", // UNAVAILABLE
        504 => "4",        // DEADLINE_EXCEEDED
        _ => "2",          // UNKNOWN
    }
}

/// Percent-encodes a `grpc-message`: all bytes except printable ASCII without the percent sign.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if (b' '..=b'~').contains(&byte) && byte != b'%' {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}
