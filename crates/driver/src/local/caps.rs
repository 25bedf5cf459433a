//! The capabilities that root inside keeps: those that packages and servers need within the
//! sandbox's own user namespace. None of them means anything to the host.

use rustix::thread::{CapabilitySet, CapabilitySets};

/// Kept: change owners and modes, switch users, signal, chroot, bind low ports.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SYS_CHROOT);

/// The highest capability a kernel may know; asking for one it does not know is an error we pass over.
const CAPABILITIES_MAX: u32 = 63;

/// Drops all others for good: from the bounding set, so that no exec brings them back.
pub(super) fn drop_most() -> rustix::io::Result<()> {
    for bit in 0..=CAPABILITIES_MAX {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        if KEPT.contains(one) {
            continue;
        }
        match rustix::thread::remove_capability_from_bounding_set(one) {
            // Past the last one that this kernel knows.
            Err(rustix::io::Errno::INVAL) => break,
            done => done?,
        }
    }
    let sets = CapabilitySets {
        effective: KEPT,
        permitted: KEPT,
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, sets)
}
