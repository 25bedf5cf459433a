//! Errors of client commands, and their exit codes.

use k8e_api::client::ConnectError;
use k8e_api::status::{Status, connection_lost, from_status, retry_after};
use std::io;
use std::time::Duration;

/// Exit code: the request failed, or the command line is wrong.
pub(crate) const EXIT_REQUEST: u8 = 1;
/// Exit code: no server could be reached.
pub(crate) const EXIT_UNREACHABLE: u8 = 2;
/// Exit code: interrupted; 128 + SIGINT, as in shells.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;
/// Exit code: 128 + SIGPIPE, for a write to a closed pipe.
const EXIT_BROKEN_PIPE: u8 = 141;

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An error to report.
    Told {
        /// The exit code.
        exit: u8,
        /// What went wrong and what to do.
        error: String,
        /// The cause, or the kind of error.
        detail: String,
        /// When to retry, if the server sent it.
        retry_after: Option<Duration>,
    },
    /// The reader of standard output has closed the pipe: nothing is reported.
    BrokenPipe,
}

// === impl Failure ===

impl Failure {
    /// The request failed.
    pub(crate) fn request(error: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Told {
            exit: EXIT_REQUEST,
            error: error.into(),
            detail: detail.into(),
            retry_after: None,
        }
    }

    /// No server could be reached.
    pub(crate) fn unreachable(error: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Told {
            exit: EXIT_UNREACHABLE,
            error: error.into(),
            detail: detail.into(),
            retry_after: None,
        }
    }

    /// A local operation failed.
    pub(crate) fn io(operation: &str, error: &io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self::BrokenPipe;
        }
        Self::request(format!("cannot {operation}: {error}"), "local")
    }

    pub(crate) fn exit(&self) -> u8 {
        match self {
            Self::Told { exit, .. } => *exit,
            Self::BrokenPipe => EXIT_BROKEN_PIPE,
        }
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        if let Some(cause) = connection_lost(&status) {
            return Self::unreachable(
                "the connection to the k8e server was lost: it stopped, or the network to it broke; \
                 `k8e sandbox status` shows whether it is back",
                cause,
            );
        }
        let error = from_status(&status);
        Self::Told {
            exit: EXIT_REQUEST,
            error: error.message,
            detail: error.code.as_str().to_owned(),
            retry_after: retry_after(&status),
        }
    }
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        Self::unreachable(error.to_string(), error.cause())
    }
}

impl From<k8e_model::Error> for Failure {
    fn from(error: k8e_model::Error) -> Self {
        Self::request(error.message, error.code.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_tell_the_request_from_the_connection() {
        assert_eq!(
            Failure::from(Status::not_found("session a not found")).exit(),
            1
        );
        // The sandbox is gone, but the server answered.
        assert_eq!(
            Failure::from(Status::unavailable("the sandbox is gone")).exit(),
            1
        );
        let lost = Status::from_error(Box::new(io::Error::from(io::ErrorKind::ConnectionReset)));
        assert_eq!(Failure::from(lost).exit(), 2);
        let closed = io::Error::from(io::ErrorKind::BrokenPipe);
        assert_eq!(Failure::io("write", &closed).exit(), 141);
    }
}
