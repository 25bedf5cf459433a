//! Errors of the operator, and the error policy: how a reconcile that met one is retried.

use crate::units::NoListener;
use std::time::Duration;

/// An error of a reconcile, or of the start of the operator.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A request to the API server failed.
    #[error("{what}: {}", message(.source))]
    Api {
        /// The request: verb, kind, namespace and name.
        what: String,
        /// Error of the client, or status of the API server.
        source: kube::Error,
    },
    /// A required name is taken by an object with another owner; the text names it.
    #[error("{0}")]
    NotOwned(String),
    /// The spec is not valid; retrying does not help.
    #[error("{message}")]
    Refused {
        /// `reason` of the condition.
        reason: &'static str,
        /// `message` of the condition.
        message: String,
    },
    /// The operator cannot start; the text has the cause.
    #[error("cannot start the operator: {0}")]
    Start(String),
    /// A bind address could not be bound.
    #[error(transparent)]
    Listen(#[from] NoListener),
    /// The lease was lost.
    #[error(
        "lost the leader election lease; this process exits, and is a standby when it is restarted"
    )]
    NotLeader,
}

/// How the error policy treats an error.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Class {
    /// 409: the object changed since it was read. Retried with back-off.
    Conflict,
    /// 404 or 410: the object does not exist. Retried with back-off.
    Gone,
    /// 422, or an invalid spec: not retried until the object changes.
    Permanent,
    /// 429 or 503: retried after the time that the API server asks for.
    Throttled(Duration),
    /// Anything else: retried with back-off.
    Transient,
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Timeout of a request to the API server. A longer one means that the connection is dead.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Awaits a response with a timeout: a reconcile that hangs would block its object for ever.
pub(crate) async fn within<T>(
    answer: impl Future<Output = std::result::Result<T, kube::Error>>,
) -> std::result::Result<T, kube::Error> {
    match tokio::time::timeout(ANSWER_WITHIN, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(kube::Error::Service(
            "the API server did not answer in time".into(),
        )),
    }
}

/// Adds the request to an error of the client.
pub(crate) trait ErrorContext<T> {
    /// `what` is verb, kind, namespace and name.
    fn with_context(self, what: impl FnOnce() -> String) -> Result<T>;
}

// === impl Error ===

impl Error {
    pub(crate) fn class(&self) -> Class {
        match self {
            Self::Api {
                source: kube::Error::Api(status),
                ..
            } => class_of(status),
            Self::Refused { .. } => Class::Permanent,
            Self::Api { .. }
            | Self::NotOwned(_)
            | Self::Start(_)
            | Self::Listen(_)
            | Self::NotLeader => Class::Transient,
        }
    }

    /// Whether an object with this name exists already.
    pub(crate) fn is_already_exists(&self) -> bool {
        matches!(self, Self::Api { source: kube::Error::Api(status), .. } if status.reason == "AlreadyExists")
    }

    /// Whether the object does not exist.
    pub(crate) fn is_gone(&self) -> bool {
        self.class() == Class::Gone
    }

    /// Whether to report it in a condition. One that is gone at the next attempt would only make `Ready` flap.
    pub(crate) fn is_reportable(&self) -> bool {
        match self {
            Self::Api {
                source: kube::Error::Api(_),
                ..
            } => {
                matches!(self.class(), Class::Permanent | Class::Transient)
            }
            Self::Api { .. } => false,
            Self::NotOwned(_)
            | Self::Refused { .. }
            | Self::Start(_)
            | Self::Listen(_)
            | Self::NotLeader => true,
        }
    }

    /// Whether the request may have been carried out in spite of the error.
    pub(crate) fn is_ambiguous(&self) -> bool {
        match self {
            Self::Api {
                source: kube::Error::Api(status),
                ..
            } => status.code >= 500,
            Self::Api { .. } => true,
            Self::NotOwned(_)
            | Self::Refused { .. }
            | Self::Start(_)
            | Self::Listen(_)
            | Self::NotLeader => false,
        }
    }
}

impl<T> ErrorContext<T> for std::result::Result<T, kube::Error> {
    fn with_context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Api {
            what: what(),
            source,
        })
    }
}

fn class_of(status: &kube::core::Status) -> Class {
    match status.code {
        404 | 410 => Class::Gone,
        409 => Class::Conflict,
        422 => Class::Permanent,
        429 | 503 => {
            let seconds = status.details.as_ref().map_or(0, |d| d.retry_after_seconds);
            Class::Throttled(Duration::from_secs(u64::from(seconds.clamp(1, 30))))
        }
        _ => Class::Transient,
    }
}

/// The message of the API server where there is one: it is shown in conditions.
fn message(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error
        && !status.message.is_empty()
    {
        return status.message.clone();
    }
    error.to_string()
}
