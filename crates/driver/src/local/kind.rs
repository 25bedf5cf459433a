//! The drivers of this machine, as plain data that goes between server and launcher.

use k8e_model::Limits;
use serde::{Deserialize, Serialize};

/// What gVisor's sentry, gofer and stub processes use themselves: 12 MiB idle, more with many
/// processes and open files. It is not the sandbox's to use, but filling it ends the sandbox, not
/// the machine.
const KERNEL_MEMORY_BYTES: u64 = 96 * 1024 * 1024;

/// gVisor counts the sandbox's processes itself. Outside each is a few threads of a stub, and the
/// sentry has its own: this only bounds what a sentry that was taken over could do.
const HOST_PIDS_PER_PID: u32 = 4;
const HOST_PIDS_MORE: u32 = 512;

/// One driver of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// The host's kernel.
    Native,
    /// A user-space kernel for each sandbox.
    Gvisor,
}

// === impl Kind ===

impl Kind {
    /// Every one.
    pub(crate) const ALL: [Self; 2] = [Self::Native, Self::Gvisor];

    /// The driver's directory below the data directory.
    pub(crate) fn directory(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Gvisor => "gvisor",
        }
    }

    /// Where in a sandbox's directory its guest listens.
    pub(crate) fn socket(self) -> &'static str {
        match self {
            Self::Native => "guest.sock",
            Self::Gvisor => "shared/guest.sock",
        }
    }

    /// Whether each sandbox has a separate kernel, which keeps limits of its own inside.
    pub(crate) fn has_kernel(self) -> bool {
        match self {
            Self::Native => false,
            Self::Gvisor => true,
        }
    }

    /// What the control group around a sandbox with `limits` gets.
    pub(crate) fn host_limits(self, limits: &Limits) -> Limits {
        match self {
            Self::Native => *limits,
            Self::Gvisor => Limits {
                memory_bytes: limits.memory_bytes.saturating_add(KERNEL_MEMORY_BYTES),
                pids: limits
                    .pids
                    .saturating_mul(HOST_PIDS_PER_PID)
                    .saturating_add(HOST_PIDS_MORE),
                ..*limits
            },
        }
    }
}
