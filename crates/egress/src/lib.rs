//! Transparent egress proxy: enforces the egress policy (allow list and deny list) of each sandbox.
//!
//! The network namespace of a sandbox has no link to the outside. A local route and TPROXY rules
//! ([`tproxy`]) deliver every packet, whatever its destination, to listening [`Sockets`] that this
//! process holds *inside* that namespace. They belong to the sandbox's [`Gate`], which is its DNS
//! server (`dns`) and its TCP proxy (`tcp`): it reads the destination name (SNI or `Host`), checks it
//! against the policy, and opens the upstream connection from the host's network namespace.
//!
//! So nothing has to be kept out, and nothing that fails lets anything through: when this process
//! dies, its sockets are closed and the kernel resets what the sandbox opens.

mod dns;
mod error;
mod fd_budget;
mod flow_log;
mod gate;
mod host_address;
mod metrics;
mod netlink;
mod netns;
mod sandbox_net;
mod sys;
mod tcp;
pub mod tproxy;
mod udp;

/// Entry points of the crate `fuzz` into private decoders.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::dns::fuzzing::*;
    pub use crate::tcp::fuzzing::*;
}

pub use error::EgressError;
pub use flow_log::{FlowMark, FlowStream};
pub use gate::{Config, Egress, Gate};
pub use netns::Sockets;
pub use sandbox_net::Policy;
