//! Where a session is in its life.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// Where a session is in its life. Only forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Its sandbox is being made.
    Creating,
    /// It answers.
    Active,
    /// Its sandbox is being removed.
    Terminating,
    /// Nothing is left but its record.
    Ended,
}

// === impl Phase ===

impl Phase {
    /// As it is written in answers and in the store.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Active => "active",
            Self::Terminating => "terminating",
            Self::Ended => "ended",
        }
    }

    /// Whether a session in this phase may go to `next`.
    pub fn may_become(self, next: Self) -> bool {
        next > self
    }
}

impl FromStr for Phase {
    type Err = Error;
    /// K8E's clients write phases with a capital.
    fn from_str(text: &str) -> Result<Self, Error> {
        match text.to_ascii_lowercase().as_str() {
            "creating" => Ok(Self::Creating),
            "active" => Ok(Self::Active),
            "terminating" => Ok(Self::Terminating),
            "ended" => Ok(Self::Ended),
            _ => Err(Error::invalid(
                "phase must be creating, active, terminating, ended or all",
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
        assert_eq!("Active".parse::<Phase>().unwrap(), Phase::Active);
    }
}
