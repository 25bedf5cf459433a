//! Set-up of a sandbox's network namespace: links, addresses, a local route for every destination,
//! and nftables TPROXY rules that deliver what arrives to the gate. Called by the process that makes
//! a sandbox, while it is inside that namespace.
//!
//! The host's user namespace owns the network namespace: root inside the sandbox has no capability
//! over it and can change none of this.

mod buffer_limits;
mod links;
mod nftables;

use crate::{EgressError, sys};
use std::net::Ipv4Addr;

/// The address of every sandbox: namespaces are isolated, so all use the same. From 198.18.0.0/15,
/// reserved for benchmarks (RFC 2544), so it belongs to no real host.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);

/// The gate's address: default gateway and DNS server of the sandbox.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);

/// The gate's port for TPROXY, TCP and UDP. Port 1, which no program uses: in a native sandbox
/// programs bind ports of the same namespace.
pub(crate) const GATE_PORT: u16 = 1;

/// The gate's port for DNS, TCP and UDP.
pub(crate) const DNS_PORT: u16 = 53;

/// The veth pair of a gVisor sandbox: the end that the sentry takes over, and the gate's end.
const VETH_SANDBOX: &str = "eth0";
const VETH_GATE: &str = "gate0";

/// Checks that the kernel supports all of it, in temporary network namespaces.
///
/// # Errors
///
/// The first step that the kernel refused.
pub fn check() -> Result<(), EgressError> {
    // On a thread that ends afterwards: the caller's network namespace does not change.
    let checked = std::thread::spawn(|| {
        let new_namespace = || {
            let made = sys::new_namespace();
            made.map_err(EgressError::step("make a network namespace"))
        };
        new_namespace()?;
        shared_kernel()?;
        new_namespace()?;
        veth()?;
        connect_veth()
    });
    checked.join().unwrap_or(Err(EgressError::NoWorker))
}

/// Set-up where [`check`] fails: loopback only, so programs inside reach each other and nothing else.
///
/// # Errors
///
/// A step that the kernel refused.
pub fn loopback_only() -> Result<(), EgressError> {
    lower_buffer_limits()?;
    links::loopback().map_err(EgressError::step("bring up loopback"))
}

/// Set-up of a native sandbox, which uses the host's network stack.
///
/// # Errors
///
/// A step that the kernel refused.
pub fn shared_kernel() -> Result<(), EgressError> {
    lower_buffer_limits()?;
    links::own_address().map_err(EgressError::step("give the sandbox an address"))?;
    finish()
}

/// First part of the set-up of a gVisor sandbox, before runsc starts: a veth pair. The sentry moves
/// the address of one end into its own network stack.
///
/// # Errors
///
/// A step that the kernel refused.
pub fn veth() -> Result<(), EgressError> {
    lower_buffer_limits()?;
    links::veth().map_err(EgressError::step("make the sandbox's veth pair"))
}

/// Second part, after the sentry has started: routes and TPROXY rules on the gate's end.
///
/// # Errors
///
/// A step that the kernel refused.
pub fn connect_veth() -> Result<(), EgressError> {
    links::route_to_veth().map_err(EgressError::step("route to the sandbox's veth pair"))?;
    finish()
}

fn lower_buffer_limits() -> Result<(), EgressError> {
    buffer_limits::lower().map_err(EgressError::step("lower the sizes of socket buffers"))
}

fn finish() -> Result<(), EgressError> {
    nftables::load().map_err(EgressError::step("load the nftables rules of the gate"))?;
    links::route_all_to_loopback().map_err(EgressError::step("route everything to the gate"))
}
