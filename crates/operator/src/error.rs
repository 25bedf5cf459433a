//! What can go wrong between the operator and the API server, and what to do about it.

use crate::units::NoListener;
use std::time::Duration;

/// A pass over an object that did not reach its end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server refused or did not answer.
    #[error("{what}: {}", said(.source))]
    Api {
        /// The request: verb, kind and name.
        what: String,
        /// What the client says.
        source: kube::Error,
    },
    /// A name that is needed is taken by an object of somebody else.
    #[error("{0}")]
    NotOwned(String),
    /// What the user asked for cannot be done, however often it is tried.
    #[error("{message}")]
    Refused {
        /// Reason of the condition.
        reason: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The operator cannot start.
    #[error("cannot start the operator: {0}")]
    Start(String),
    /// A port is taken.
    #[error(transparent)]
    Listen(#[from] NoListener),
    /// Another process leads now.
    #[error(
        "leadership was lost to another process; this one stops so that it starts again as standby"
    )]
    NotLeader,
}

/// What an error means for the pass that met it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Class {
    /// Somebody changed the object: look again at once.
    Conflict,
    /// The object is gone: whoever deleted it knows.
    Gone,
    /// Trying again cannot help until somebody changes the object.
    Permanent,
    /// The server asks to come back later.
    Throttled(Duration),
    /// Anything else: try again, less and less often.
    Transient,
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// An answer that takes longer never comes: the connection died without a word.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// The answer to a request, or an error in time: a pass that waits for ever keeps its object from every other.
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

/// Gives an error of the client its request.
pub(crate) trait Context<T> {
    /// `what` is verb, kind and name.
    fn doing(self, what: impl FnOnce() -> String) -> Result<T>;
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

    /// Whether the server has an object of that name already.
    pub(crate) fn is_already_exists(&self) -> bool {
        matches!(self, Self::Api { source: kube::Error::Api(status), .. } if status.reason == "AlreadyExists")
    }

    /// Whether the object is not there.
    pub(crate) fn is_gone(&self) -> bool {
        self.class() == Class::Gone
    }

    /// Whether it belongs into a condition: what is over at the next attempt would only make a ready object flap.
    pub(crate) fn is_worth_telling(&self) -> bool {
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

    /// Whether nobody knows what became of the request: it may have been carried out.
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

impl<T> Context<T> for std::result::Result<T, kube::Error> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
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

/// The server's own sentence where it gave one: people read it in a condition.
fn said(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error
        && !status.message.is_empty()
    {
        return status.message.clone();
    }
    error.to_string()
}
