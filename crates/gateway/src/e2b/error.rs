//! Errors as E2B's clients read them: an HTTP status, and JSON with a numeric code and a message.

use super::body::{self, Answer};
use hyper::StatusCode;
use hyper::header::{HeaderName, HeaderValue, RETRY_AFTER};
use k8e_engine::Error;
use k8e_model::{Code, SessionId};
use serde_json::{Value, json};

/// What E2B's clients look for in the message to report that a sandbox does not run.
pub(super) const NOT_FOUND: &str = "The sandbox was not found";

/// Without it, the Python client repeats a call that failed with 502, 503 or 504, also one that made something.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");

/// Why a call failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) status: StatusCode,
    pub(super) message: String,
    /// Of requests to a sandbox: which, and which port of it.
    sandbox: Option<SessionId>,
    port: Option<u16>,
}

// === impl Failure ===

impl Failure {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            sandbox: None,
            port: None,
        }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(super) fn unauthenticated(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message)
    }

    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// What this server cannot do; never answered with a success.
    pub(super) fn unsupported(what: &str) -> Self {
        let message = format!("{what}: this server does not have it; docs/e2b.md says what it has");
        Self::new(StatusCode::NOT_IMPLEMENTED, message)
    }

    /// There is no such sandbox, or it does not run.
    pub(super) fn gone(id: &SessionId) -> Self {
        Self {
            sandbox: Some(id.clone()),
            ..Self::new(StatusCode::BAD_GATEWAY, NOT_FOUND)
        }
    }

    /// Nothing listens on a port of a sandbox.
    pub(super) fn port_closed(id: &SessionId, port: u16) -> Self {
        Self {
            sandbox: Some(id.clone()),
            port: Some(port),
            ..Self::new(
                StatusCode::BAD_GATEWAY,
                "The sandbox is running but port is not open",
            )
        }
    }

    /// Of the control API.
    pub(super) fn of(error: &Error) -> Self {
        Self::new(status(error.code()), error.to_string())
    }

    /// Of a call to the sandbox `id`: one that is gone or paused is reported as such.
    pub(super) fn in_sandbox(id: &SessionId, error: &Error) -> Self {
        if is_gone(error) {
            return Self::gone(id);
        }
        Self::of(error)
    }

    pub(super) fn answer(self) -> Answer {
        let mut text = json!({ "code": self.status.as_u16(), "message": self.message });
        if let Some(id) = &self.sandbox {
            text["sandboxId"] = Value::from(id.as_str());
        }
        if let Some(port) = self.port {
            text["port"] = Value::from(port);
        }
        let kind = HeaderValue::from_static("application/json");
        let mut answer = body::full(self.status, kind, text.to_string());
        let headers = answer.headers_mut();
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        } else if self.status.is_server_error() {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        answer
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::of(&error)
    }
}

impl From<k8e_model::Error> for Failure {
    fn from(error: k8e_model::Error) -> Self {
        Self::new(status(error.code), error.message)
    }
}

/// Whether the sandbox has ended, or is paused.
pub(super) fn is_gone(error: &Error) -> bool {
    matches!(
        error,
        Error::SessionNotFound(_)
            | Error::SessionOver { .. }
            | Error::SessionEnded { .. }
            | Error::SessionPaused(_)
            | Error::SessionNotReady(_)
            | Error::GuestGone(_)
    )
}

fn status(code: Code) -> StatusCode {
    match code {
        Code::Invalid => StatusCode::BAD_REQUEST,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::Exists | Code::Precondition => StatusCode::CONFLICT,
        Code::Exhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Denied => StatusCode::FORBIDDEN,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::Unsupported => StatusCode::NOT_IMPLEMENTED,
        Code::Timeout => StatusCode::GATEWAY_TIMEOUT,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
