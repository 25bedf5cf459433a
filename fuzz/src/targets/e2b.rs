//! The E2B API: messages of the Connect protocol in their envelopes.

use crate::outcome;
use k8e_gateway::fuzzing;

/// The invariants are checked where the decoder is.
pub(super) fn connect_envelopes(bytes: &[u8]) -> u64 {
    outcome(&format!("{:?}", fuzzing::connect_envelopes(bytes)))
}
