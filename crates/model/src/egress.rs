//! Egress policy: host names, networks, allow and deny rules, and the log entry of each attempt.
//!
//! Pure functions of their arguments; DNS and connections are in `crates/egress`.

mod deny;
mod flow;
mod name;
mod net;
mod policy;
mod presets;
mod rule;

pub use deny::DenyList;
pub use flow::{DenyReason, Flow, FlowProtocol, FlowVerdict};
pub use name::{HostName, HostPattern};
pub use net::{Ipv4Net, is_never, is_public};
pub use policy::{EgressPolicy, RULES_MAX};
pub use presets::preset_names;
pub use rule::{Rule, Target};

/// As much of an entry as an error repeats: names have 253 characters at most, and what is longer
/// is not worth a longer message.
const SHOWN_CHARS_MAX: usize = 80;

/// The part of an entry that an error shows.
fn shown(text: &str) -> String {
    text.chars().take(SHOWN_CHARS_MAX).collect()
}
