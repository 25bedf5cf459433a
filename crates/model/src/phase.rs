//! Lifecycle phases of a session.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// Lifecycle phase of a session. Transitions only go forward, except that a paused session can become active again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Its sandbox is being created.
    Creating,
    /// Ready for calls.
    Active,
    /// All processes are stopped until it is resumed.
    Paused,
    /// Its sandbox is being removed.
    Terminating,
    /// Only its record is left.
    Ended,
}

// === impl Phase ===

impl Phase {
    /// As it is written in answers and in the store.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Active => "active",
            Self::Paused => "paused",
            Self::Terminating => "terminating",
            Self::Ended => "ended",
        }
    }

    /// Whether a session in this phase may go to `next`.
    pub fn may_become(self, next: Self) -> bool {
        match (self, next) {
            (Self::Paused, Self::Active) => true,
            // What is being made is first made.
            (Self::Creating, Self::Paused) => false,
            (from, to) => to > from,
        }
    }

    /// Whether a session in this phase is over, or about to be.
    pub fn is_ending(self) -> bool {
        self >= Self::Terminating
    }
}

impl FromStr for Phase {
    type Err = Error;
    /// Any case: `sandbox.v1` clients write phases with a capital.
    fn from_str(text: &str) -> Result<Self, Error> {
        match text.to_ascii_lowercase().as_str() {
            "creating" => Ok(Self::Creating),
            "active" => Ok(Self::Active),
            "paused" => Ok(Self::Paused),
            "terminating" => Ok(Self::Terminating),
            "ended" => Ok(Self::Ended),
            _ => Err(Error::invalid(
                "phase must be creating, active, paused, terminating, ended or all",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_only_go_forward() {
        assert!(Phase::Creating.may_become(Phase::Ended));
        assert!(!Phase::Ended.may_become(Phase::Active));
        assert!(!Phase::Active.may_become(Phase::Active));
        assert!(Phase::Active.may_become(Phase::Paused));
        assert!(Phase::Paused.may_become(Phase::Active));
        assert!(Phase::Paused.may_become(Phase::Terminating));
        assert!(!Phase::Terminating.may_become(Phase::Paused));
        assert!(!Phase::Paused.is_ending() && Phase::Terminating.is_ending());
        assert_eq!("Active".parse::<Phase>().unwrap(), Phase::Active);
    }
}
