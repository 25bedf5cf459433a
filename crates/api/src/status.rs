//! Error codes of the model as gRPC codes, and back. The only place that knows both.

use k8e_model::{Code, Error};
use std::error::Error as _;
use std::time::Duration;
pub use tonic::Status;
use tonic_types::{ErrorDetails, StatusExt as _};

/// A message travels in an HTTP/2 header, and those are bounded at both ends.
const MESSAGE_BYTES_MAX: usize = 4096;

/// Retry hint of `RESOURCE_EXHAUSTED`: by then sessions may have ended and queued launches begun.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The gRPC status of an error.
pub fn to_status(code: Code, message: &str) -> Status {
    let end = message.floor_char_boundary(MESSAGE_BYTES_MAX);
    let message = &message[..end];
    if code == Code::Exhausted {
        let details = ErrorDetails::with_retry_info(Some(RETRY_AFTER));
        return Status::with_error_details(grpc_code(code), message, details);
    }
    Status::new(grpc_code(code), message)
}

/// When it is worth trying again, if the server says so.
pub fn retry_after(status: &Status) -> Option<Duration> {
    status.get_details_retry_info()?.retry_delay
}

/// The error of a gRPC status.
pub fn from_status(status: &Status) -> Error {
    Error::new(model_code(status.code()), status.message())
}

/// Why the connection broke, when it was that and not the server that ended a call.
pub fn connection_lost(status: &Status) -> Option<String> {
    // Errors of the server have no source; errors of the connection have.
    let mut cause = status.source()?;
    while let Some(next) = cause.source() {
        cause = next;
    }
    Some(without_manual(&cause.to_string()))
}

/// Without the URL of a library's manual, which does not help the user of a command.
fn without_manual(cause: &str) -> String {
    if cause.contains("close_notify") {
        return "the server closed the connection".to_owned();
    }
    let end = cause.find(": https://").unwrap_or(cause.len());
    cause[..end].to_owned()
}

fn grpc_code(code: Code) -> tonic::Code {
    match code {
        Code::Invalid => tonic::Code::InvalidArgument,
        Code::NotFound => tonic::Code::NotFound,
        Code::Exists => tonic::Code::AlreadyExists,
        Code::Precondition => tonic::Code::FailedPrecondition,
        Code::Exhausted => tonic::Code::ResourceExhausted,
        Code::Denied => tonic::Code::PermissionDenied,
        Code::Unauthenticated => tonic::Code::Unauthenticated,
        Code::Unsupported => tonic::Code::Unimplemented,
        Code::Timeout => tonic::Code::DeadlineExceeded,
        Code::Unavailable => tonic::Code::Unavailable,
        Code::Internal => tonic::Code::Internal,
    }
}

/// Ours come back as they went; the rest is what gRPC itself and proxies say.
fn model_code(code: tonic::Code) -> Code {
    match code {
        tonic::Code::InvalidArgument | tonic::Code::OutOfRange => Code::Invalid,
        tonic::Code::NotFound => Code::NotFound,
        tonic::Code::AlreadyExists => Code::Exists,
        tonic::Code::FailedPrecondition | tonic::Code::Aborted => Code::Precondition,
        tonic::Code::ResourceExhausted => Code::Exhausted,
        tonic::Code::PermissionDenied => Code::Denied,
        tonic::Code::Unauthenticated => Code::Unauthenticated,
        tonic::Code::Unimplemented => Code::Unsupported,
        tonic::Code::DeadlineExceeded => Code::Timeout,
        tonic::Code::Unavailable | tonic::Code::Cancelled => Code::Unavailable,
        tonic::Code::Ok | tonic::Code::Unknown | tonic::Code::DataLoss | tonic::Code::Internal => {
            Code::Internal
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Code; 11] = [
        Code::Invalid,
        Code::NotFound,
        Code::Exists,
        Code::Precondition,
        Code::Exhausted,
        Code::Denied,
        Code::Unauthenticated,
        Code::Unsupported,
        Code::Timeout,
        Code::Unavailable,
        Code::Internal,
    ];

    #[test]
    fn every_code_and_its_text_come_back() {
        for code in ALL {
            let back = from_status(&to_status(code, "session a not found"));
            assert_eq!(back, Error::new(code, "session a not found"));
        }
    }

    #[test]
    fn what_is_used_up_says_when_to_try_again() {
        let full = to_status(Code::Exhausted, "no more sessions");
        assert_eq!(retry_after(&full), Some(RETRY_AFTER));
        assert_eq!(retry_after(&to_status(Code::Invalid, "no")), None);
    }

    #[test]
    fn a_lost_connection_is_told_without_a_manual() {
        let lost = |text: &str| {
            let cause = std::io::Error::other(text.to_owned());
            connection_lost(&Status::from_error(Box::new(cause))).unwrap()
        };
        assert_eq!(
            lost(
                "peer closed connection without sending TLS close_notify: https://docs.rs/rustls/x"
            ),
            "the server closed the connection"
        );
        assert_eq!(lost("odd: https://docs.example/x"), "odd");
        assert_eq!(lost("broken pipe"), "broken pipe");
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let status = to_status(Code::Invalid, &"é".repeat(MESSAGE_BYTES_MAX));
        assert_eq!(status.message().len(), MESSAGE_BYTES_MAX);
        assert_eq!(
            to_status(Code::Invalid, &format!("x{}", "é".repeat(4096)))
                .message()
                .len(),
            4095
        );
    }
}
