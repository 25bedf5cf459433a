//! Drops root: uid, gid, supplementary groups and all capabilities, and sets `no_new_privs`.

use crate::{ConfineError, Confinement};
use rustix::process::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// The highest capability a kernel may know; asking for one it does not know is an error we pass over.
const CAPABILITIES_MAX: u32 = 63;

/// The calls below change only the calling thread.
pub(crate) fn one_thread() -> Result<(), ConfineError> {
    let tasks = std::fs::read_dir("/proc/self/task");
    let tasks = tasks.map_err(|error| ConfineError::Step("count threads", error))?;
    match tasks.count() {
        1 => Ok(()),
        threads => Err(ConfineError::Threads(threads)),
    }
}

pub(crate) fn become_user(confinement: &Confinement) -> Result<(), ConfineError> {
    let Confinement { uid, gid, .. } = *confinement;
    if uid == 0 || gid == 0 {
        return Err(ConfineError::Root { uid, gid });
    }
    let step = |what| move |error: rustix::io::Errno| ConfineError::Step(what, error.into());
    // While the process has CAP_SETPCAP: no exec can bring a capability back.
    empty_bounding_set().map_err(step("drop capabilities from the bounding set"))?;
    let groups: Vec<Gid> = confinement
        .groups
        .iter()
        .map(|gid| Gid::from_raw(*gid))
        .collect();
    rustix::thread::set_thread_groups(&groups).map_err(step("set supplementary groups"))?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(step("set the group"))?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(step("set the user"))?;
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none).map_err(step("drop capabilities"))?;
    rustix::thread::set_no_new_privs(true).map_err(step("set no_new_privs"))
}

fn empty_bounding_set() -> rustix::io::Result<()> {
    for bit in 0..=CAPABILITIES_MAX {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        match rustix::thread::remove_capability_from_bounding_set(one) {
            // Past the last one that this kernel knows.
            Err(rustix::io::Errno::INVAL) => break,
            done => done?,
        }
    }
    Ok(())
}
