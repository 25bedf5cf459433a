//! seccomp filter around runsc: Unix sockets that programs bind stay inside the sentry.
//!
//! The guest's socket is bound on the host (`--host-uds=create`), but a checkpoint cannot hold a socket of the host,
//! and tmux, ssh-agent and databases all bind one. gVisor makes a socket inside the sentry instead when the host
//! refuses with EPERM. A filter cannot read the address, but its length: all lengths are refused but those of gVisor's
//! own sockets and the guest's, whose names have an unusual one. A program that binds a name of just that length
//! cannot be checkpointed; that is all it gains.

use super::bundle::SHARED;
use super::socket::NAMES;
use crate::DriverError;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};
use std::io;

/// Where the gofer of runsc sees the root file system.
const GOFER_ROOT: &str = "/root";

/// runsc's control socket in its state directory.
const CONTROL_SOCKET: &str = "/runsc-sandbox.sock";

/// `sockaddr_nl` and `sockaddr_ll`: how runsc finds the network interfaces and passes them to the sentry.
const NETLINK_BYTES: u64 = 12;
const PACKET_BYTES: u64 = 20;

/// Installs it on this process and its future children.
pub(super) fn install(state_dir: &str) -> Result<(), DriverError> {
    let failed = |error: String| DriverError::step("apply", "seccomp")(io::Error::other(error));
    let filter = compile(state_dir).map_err(|error| failed(error.to_string()))?;
    seccompiler::apply_filter(&filter).map_err(|error| failed(error.to_string()))
}

fn compile(state_dir: &str) -> Result<BpfProgram, BackendError> {
    // The family, the path and a zero byte.
    let unix = |path_bytes: usize| path_bytes as u64 + 3;
    let guest = SHARED.len() + 1 + NAMES[0].len();
    let allowed = [
        NETLINK_BYTES,
        PACKET_BYTES,
        unix(state_dir.len() + CONTROL_SOCKET.len()),
        unix(guest),
        unix(GOFER_ROOT.len() + guest),
    ];
    let other = allowed
        .map(|bytes| SeccompCondition::new(2, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, bytes));
    let other = other.into_iter().collect::<Result<Vec<_>, _>>()?;
    let rule = SeccompRule::new(other)?;
    SeccompFilter::new(
        [(libc::SYS_bind, vec![rule])].into_iter().collect(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM.unsigned_abs()),
        TargetArch::try_from(std::env::consts::ARCH)?,
    )?
    .try_into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_compiles_and_both_names_have_one_length() {
        compile("/run/state").unwrap();
        assert_eq!(NAMES[0].len(), NAMES[1].len());
        assert!(GOFER_ROOT.len() + SHARED.len() + 1 + NAMES[0].len() < 108);
    }
}
