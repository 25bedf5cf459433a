//! A request to run a command: the command, and the session to run it in.

use crate::{Command, SessionId, SessionSpec};

/// A request to run a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRequest {
    /// The session to run it in.
    pub target: RunTarget,
    /// The command. The engine fills in its default timeout.
    pub command: Command,
}

/// The session to run in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunTarget {
    /// Exactly this session.
    Existing(SessionId),
    /// The session that an earlier call with this target created for the same principal, client kind and tenant with the
    /// same options; it is created when there is none.
    Tenant(SessionSpec),
    /// A session that is created for this run and destroyed after it.
    Fresh(SessionSpec),
}

// === impl RunTarget ===

impl RunTarget {
    /// The session, if one was named; else empty.
    pub fn named(&self) -> &str {
        match self {
            Self::Existing(id) => id.as_str(),
            Self::Tenant(_) | Self::Fresh(_) => "",
        }
    }
}
