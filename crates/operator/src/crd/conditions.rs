//! Status conditions: their types, and how one is built.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Condition type: the sandbox can be used.
pub const READY: &str = "Ready";
/// Condition type: the sandbox is suspended; its pod is deleted.
pub const SUSPENDED: &str = "Suspended";
/// Condition type: the pod has a node; mirrors the condition of the pod.
pub const POD_SCHEDULED: &str = "PodScheduled";
/// Condition type: the pod has finished (phase Succeeded or Failed).
pub const FINISHED: &str = "Finished";

/// A condition without its times and generation.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Verdict {
    /// `True`, `False` or `Unknown`.
    pub status: &'static str,
    /// CamelCase word that clients match.
    pub reason: String,
    /// Text for people; at most 32,000 bytes.
    pub message: String,
}

// === impl Verdict ===

impl Verdict {
    /// Status `True`.
    pub fn yes(reason: &str, message: impl Into<String>) -> Self {
        Self::new("True", reason, message)
    }

    /// Status `False`.
    pub fn no(reason: &str, message: impl Into<String>) -> Self {
        Self::new("False", reason, message)
    }

    /// Status `Unknown`.
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

    /// Builds the condition. `lastTransitionTime` is kept if `before` has the same status.
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

/// Longest message in bytes. The API server rejects a whole status with a longer one (32,768 characters).
const MESSAGE_BYTES_MAX: usize = 32_000;

fn shortened(mut message: String) -> String {
    message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
    message
}

/// Whether a condition exists and has the status `True`.
pub fn is_true(condition: Option<&Condition>) -> bool {
    condition.is_some_and(|c| c.status == "True")
}
