//! Errors of a call, and their codes in replies to the host.

use k8e_wire::proto::{self, ErrorCode};
use std::io;

/// Longest message sent to the host, in bytes: a path of the longest kind, and text around it.
const MESSAGE_BYTES_MAX: usize = 8 * 1024;

/// Why a call failed. The host gets its code and its message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// A path leads out of its root.
    #[error("path {path:?} leads out of {root:?}")]
    Outside {
        /// The requested path.
        path: String,
        /// The root that it must stay below.
        root: String,
    },
    /// A file call on a directory.
    #[error("{0:?} is a directory")]
    IsDirectory(String),
    /// A path goes through, or ends at, something that is no directory.
    #[error("{0:?} is not a directory")]
    NotDirectory(String),
    /// The program does not exist.
    #[error("program {0:?} was not found in the sandbox")]
    NoProgram(String),
    /// The run or terminal does not exist.
    #[error("there is no {0}")]
    NotFound(String),
    /// The run or terminal exists already.
    #[error("{0} exists already")]
    Exists(String),
    /// The object is not in a state for this call.
    #[error("{0}")]
    Precondition(String),
    /// Out of processes, memory or disk.
    #[error("{0}")]
    Exhausted(String),
    /// A system call failed.
    #[error("{operation} {object:?}: {source}")]
    Os {
        /// The operation.
        operation: &'static str,
        /// Its object, such as a path.
        object: String,
        /// The error of the system call.
        source: io::Error,
    },
    /// The connection failed: no reply can be sent.
    #[error(transparent)]
    Wire(#[from] k8e_wire::WireError),
    /// The host closed the connection, which cancels.
    #[error("the host cancelled the call")]
    Cancelled,
}

// === impl Error ===

impl Error {
    /// For `map_err` on a system call: names the operation and its object.
    pub(crate) fn os<E: Into<io::Error>>(
        operation: &'static str,
        object: &[u8],
    ) -> impl FnOnce(E) -> Self {
        move |source| Self::from_os(operation, object, source.into())
    }

    /// Its code for the host.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::Invalid(_) => ErrorCode::Invalid,
            Self::Outside { .. } => ErrorCode::Outside,
            Self::IsDirectory(_) => ErrorCode::IsDirectory,
            Self::NotDirectory(_) => ErrorCode::NotDirectory,
            Self::NoProgram(_) => ErrorCode::NoProgram,
            Self::NotFound(_) => ErrorCode::NotFound,
            Self::Exists(_) => ErrorCode::Exists,
            Self::Precondition(_) => ErrorCode::Precondition,
            Self::Exhausted(_) => ErrorCode::Exhausted,
            Self::Os { source, .. } => os_code(source),
            Self::Wire(_) | Self::Cancelled => ErrorCode::Io,
        }
    }

    /// As a reply to the host.
    pub(crate) fn to_proto(&self) -> proto::Error {
        let mut message = self.to_string();
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        proto::Error {
            code: self.code().into(),
            message,
        }
    }

    fn from_os(operation: &'static str, object: &[u8], source: io::Error) -> Self {
        let shown = show(object);
        match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => Self::Exhausted(format!(
                "{operation} {shown:?}: the disk limit of the sandbox is reached"
            )),
            Some(libc::ENOMEM) => Self::Exhausted(format!(
                "{operation} {shown:?}: the memory limit of the sandbox is reached"
            )),
            Some(libc::EMFILE | libc::ENFILE) => Self::Exhausted(format!(
                "{operation} {shown:?}: too many open files in the sandbox"
            )),
            Some(libc::EISDIR) => Self::IsDirectory(shown),
            Some(libc::ENOTDIR) => Self::NotDirectory(shown),
            _ => Self::Os {
                operation,
                object: shown,
                source,
            },
        }
    }
}

/// Bytes of a name for a message, lossy UTF-8.
pub(crate) fn show(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn os_code(error: &io::Error) -> ErrorCode {
    match error.raw_os_error() {
        Some(libc::ENOENT) => ErrorCode::NotFound,
        Some(libc::EEXIST) => ErrorCode::Exists,
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => ErrorCode::Permission,
        Some(libc::EINVAL | libc::ENAMETOOLONG | libc::ENOTEMPTY | libc::ELOOP | libc::EXDEV) => {
            ErrorCode::Invalid
        }
        _ => ErrorCode::Io,
    }
}
