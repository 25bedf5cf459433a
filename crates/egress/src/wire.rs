//! The network namespace of a sandbox: an address, a route that leads every packet back into the
//! namespace, and rules that hand what arrives to the gate. For the process that makes a sandbox,
//! while it is inside that namespace.
//!
//! It belongs to the host's root: nothing inside may change any of it.

mod ceilings;
mod links;
mod rules;

use crate::{EgressError, sys};
use std::net::Ipv4Addr;

/// The sandbox's own address. The same in each: their namespaces have nothing to do with each
/// other. From the range for benchmarks of network devices, which is nobody's address anywhere.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);

/// Whom it asks for names.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);

/// Where the gate listens for everything that is not DNS. A port that nobody uses: in a native
/// sandbox programs share the ports with it.
pub(crate) const GATE_PORT: u16 = 1;

/// Where the gate listens for DNS.
pub(crate) const DNS_PORT: u16 = 53;

/// What a kernel of its own uses as its network card, and where that leads.
const CARD: &str = "eth0";
const CARD_PEER: &str = "gate0";

/// Tries it all out, in namespaces that are gone afterwards.
///
/// # Errors
///
/// What this machine's kernel cannot do.
pub fn check() -> Result<(), EgressError> {
    // Of a thread that ends: the caller stays where it is.
    let tried = std::thread::spawn(|| {
        let new_namespace = || {
            let made = sys::new_namespace();
            made.map_err(EgressError::step("make a network namespace"))
        };
        new_namespace()?;
        shared_kernel()?;
        new_namespace()?;
        card()?;
        connect_card()
    });
    tried.join().unwrap_or(Err(EgressError::NoWorker))
}

/// For a sandbox on a machine that cannot do it: programs inside reach each other, and nobody else.
///
/// # Errors
///
/// A step that the kernel refused.
pub fn nothing() -> Result<(), EgressError> {
    lower_ceilings()?;
    links::loopback().map_err(EgressError::step("bring up loopback"))
}

/// For a sandbox that uses the host's kernel.
///
/// # Errors
///
/// A step that the kernel refused.
pub fn shared_kernel() -> Result<(), EgressError> {
    lower_ceilings()?;
    links::own_address().map_err(EgressError::step("give the sandbox an address"))?;
    finish()
}

/// For a sandbox with a kernel of its own: a card for it, before it starts. It takes over the
/// card's address.
///
/// # Errors
///
/// A step that the kernel refused.
pub fn card() -> Result<(), EgressError> {
    lower_ceilings()?;
    links::card().map_err(EgressError::step("make the sandbox's network card"))
}

/// Connects the card to the gate, after that kernel has started.
///
/// # Errors
///
/// A step that the kernel refused.
pub fn connect_card() -> Result<(), EgressError> {
    links::route_to_card().map_err(EgressError::step("route to the sandbox's network card"))?;
    finish()
}

fn lower_ceilings() -> Result<(), EgressError> {
    ceilings::lower().map_err(EgressError::step("lower the sizes of socket buffers"))
}

fn finish() -> Result<(), EgressError> {
    rules::load().map_err(EgressError::step("load the rules of the gate"))?;
    links::everything_is_here().map_err(EgressError::step("route everything to the gate"))
}
