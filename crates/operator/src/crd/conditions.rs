//! Conditions: their types and reasons as clients match them, and how one is set.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// The sandbox can be used.
pub const READY: &str = "Ready";
/// The sandbox's pod was deleted on request.
pub const SUSPENDED: &str = "Suspended";
/// The pod has a node; mirrors the pod's own condition.
pub const POD_SCHEDULED: &str = "PodScheduled";
/// The pod ended by itself.
pub const FINISHED: &str = "Finished";

/// Status and words of a condition, before it is known since when.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Verdict {
    /// `True`, `False` or `Unknown`.
    pub status: &'static str,
    /// One word that clients match.
    pub reason: String,
    /// A sentence for people.
    pub message: String,
}

// === impl Verdict ===

impl Verdict {
    /// A condition that holds.
    pub fn yes(reason: &str, message: impl Into<String>) -> Self {
        Self::new("True", reason, message)
    }

    /// A condition that does not hold.
    pub fn no(reason: &str, message: impl Into<String>) -> Self {
        Self::new("False", reason, message)
    }

    /// A condition of which nothing is known.
    pub fn unknown(reason: &str, message: impl Into<String>) -> Self {
        Self::new("Unknown", reason, message)
    }

    fn new(status: &'static str, reason: &str, message: impl Into<String>) -> Self {
        Self {
            status,
            reason: reason.to_owned(),
            message: shortened(message.into()),
        }
    }

    /// The condition as it is written, its time kept where `before` had the same status.
    pub fn condition(
        self,
        kind: &str,
        generation: i64,
        before: Option<&Condition>,
        now: &Time,
    ) -> Condition {
        let since = before.filter(|old| old.status == self.status);
        Condition {
            type_: kind.to_owned(),
            status: self.status.to_owned(),
            last_transition_time: since
                .map_or_else(|| now.clone(), |old| old.last_transition_time.clone()),
            observed_generation: Some(generation),
            reason: self.reason,
            message: self.message,
        }
    }
}

/// A longer message is refused, and the whole status with it.
const LONGEST_MESSAGE: usize = 32_000;

fn shortened(mut message: String) -> String {
    message.truncate(message.floor_char_boundary(LONGEST_MESSAGE));
    message
}

/// Whether a condition holds.
pub fn is_true(condition: Option<&Condition>) -> bool {
    condition.is_some_and(|c| c.status == "True")
}
