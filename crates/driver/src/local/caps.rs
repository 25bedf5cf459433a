//! Capabilities of root inside: those that packages and servers need within the
//! sandbox's own user namespace. None of them is valid on the host.

use rustix::thread::{CapabilitySet, CapabilitySets};

/// Kept: change owners and modes, switch users, signal, chroot, bind low ports.
const KEPT: [(&str, CapabilitySet); 11] = [
    ("CAP_CHOWN", CapabilitySet::CHOWN),
    ("CAP_DAC_OVERRIDE", CapabilitySet::DAC_OVERRIDE),
    ("CAP_FOWNER", CapabilitySet::FOWNER),
    ("CAP_FSETID", CapabilitySet::FSETID),
    ("CAP_KILL", CapabilitySet::KILL),
    ("CAP_SETGID", CapabilitySet::SETGID),
    ("CAP_SETUID", CapabilitySet::SETUID),
    ("CAP_SETPCAP", CapabilitySet::SETPCAP),
    ("CAP_SETFCAP", CapabilitySet::SETFCAP),
    ("CAP_NET_BIND_SERVICE", CapabilitySet::NET_BIND_SERVICE),
    ("CAP_SYS_CHROOT", CapabilitySet::SYS_CHROOT),
];

/// The highest capability a kernel may know; asking for one it does not know is an error we pass over.
const CAPABILITIES_MAX: u32 = 63;

/// What an unpacker of layers keeps in its own user namespace: it writes files with any owner and mode.
pub(crate) const UNPACKER: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID);

/// Their names.
pub(crate) fn kept_names() -> [&'static str; KEPT.len()] {
    KEPT.map(|(name, _)| name)
}

/// Drops all others: also from the bounding set, so that no exec brings them back.
pub(crate) fn drop_most() -> rustix::io::Result<()> {
    let kept = KEPT
        .iter()
        .fold(CapabilitySet::empty(), |all, (_, one)| all | *one);
    drop_all_but(kept)
}

/// Drops all but `kept` for good.
pub(crate) fn drop_all_but(kept: CapabilitySet) -> rustix::io::Result<()> {
    for bit in 0..=CAPABILITIES_MAX {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        if kept.contains(one) {
            continue;
        }
        match rustix::thread::remove_capability_from_bounding_set(one) {
            // Past the last one that this kernel knows.
            Err(rustix::io::Errno::INVAL) => break,
            done => done?,
        }
    }
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, sets)
}
