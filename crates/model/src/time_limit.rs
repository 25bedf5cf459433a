//! A time limit in a request: the server's default, a duration, or no limit.

use std::time::Duration;

/// A time limit in a request. The engine fills in the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeLimit {
    /// The server's default.
    #[default]
    Default,
    /// This long.
    After(Duration),
    /// No limit.
    Never,
}

// === impl TimeLimit ===

impl TimeLimit {
    /// The limit, with the server's default filled in; `None` is no limit.
    pub fn or(self, default: Option<Duration>) -> Option<Duration> {
        match self {
            Self::Default => default,
            Self::After(time) => Some(time),
            Self::Never => None,
        }
    }
}

impl From<Option<Duration>> for TimeLimit {
    /// `None` is no limit.
    fn from(limit: Option<Duration>) -> Self {
        limit.map_or(Self::Never, Self::After)
    }
}
