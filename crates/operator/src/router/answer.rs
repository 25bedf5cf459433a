//! What the router itself answers: why a request was not passed on, in the form that its clients read.

use super::body::{Answer, empty, full};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use std::borrow::Cow;

/// A request that was not passed on.
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

    /// As JSON, or as the end of a gRPC call: gRPC clients read no body.
    pub(super) fn answer(&self, grpc: bool) -> Answer {
        if grpc { self.grpc() } else { self.json() }
    }

    fn json(&self) -> Answer {
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

    fn grpc(&self) -> Answer {
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

/// Which of gRPC's codes says the same.
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

/// As gRPC wants its messages: printable ASCII but the percent sign stands for itself.
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
