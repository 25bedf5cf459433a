//! What a sandbox may reach, made real.
//!
//! The network namespace of a sandbox has no way out: no interface of it leads anywhere
//! ([`wire`]). Whatever is sent in it, to whatever address, the kernel hands to [`Sockets`] that this
//! process holds *inside* that namespace: the sandbox's [`Gate`]. The gate answers DNS for names
//! that are allowed (`dns`), reads from each connection for whom it is meant (`tcp`), and makes
//! the real connection itself, from the host's side, if the policy allows it.
//!
//! So nothing has to be kept out, and nothing that fails lets anything through: a process that dies
//! takes its sockets along.

mod descriptors;
mod dns;
mod error;
mod gate;
mod journal;
mod machine;
mod metrics;
mod netlink;
mod netns;
mod sys;
mod tcp;
mod udp;
mod ward;
pub mod wire;

/// For the crate `fuzz`: decoders that are nobody else's business.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::dns::fuzzing::*;
    pub use crate::tcp::fuzzing::*;
}

pub use error::EgressError;
pub use gate::{Config, Egress, Gate};
pub use journal::{FlowMark, FlowStream};
pub use netns::Sockets;
pub use ward::Policy;
