//! Error codes, the same for every API.

use serde::{Deserialize, Serialize};

/// The meaning of an error. Each door maps it once: to a gRPC status, an HTTP status, an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The request can never work as it is.
    Invalid,
    /// What it names does not exist, or is not the caller's.
    NotFound,
    /// What it would make exists already.
    Exists,
    /// The thing exists but its state forbids this now.
    Precondition,
    /// A limit is reached; trying again later can work.
    Exhausted,
    /// The caller may not do this.
    Denied,
    /// The caller did not say who it is, or not credibly.
    Unauthenticated,
    /// Nothing here can do this: a runtime or an interpreter is missing.
    Unsupported,
    /// It took longer than it may.
    Timeout,
    /// The sandbox or the server is gone or unreachable.
    Unavailable,
    /// A fault of ours or of the machine.
    Internal,
}

/// A rule that was broken: the kind, and a message that says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// The kind.
    pub code: Code,
    /// Lower case, no period, names the object and the way out.
    pub message: String,
}

// === impl Code ===

impl Code {
    /// As it is written in answers, the audit and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::NotFound => "not_found",
            Self::Exists => "exists",
            Self::Precondition => "precondition",
            Self::Exhausted => "exhausted",
            Self::Denied => "denied",
            Self::Unauthenticated => "unauthenticated",
            Self::Unsupported => "unsupported",
            Self::Timeout => "timeout",
            Self::Unavailable => "unavailable",
            Self::Internal => "internal",
        }
    }
}

// === impl Error ===

impl Error {
    /// An error of any kind.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    /// The request can never work as it is.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::Invalid, message)
    }
}
