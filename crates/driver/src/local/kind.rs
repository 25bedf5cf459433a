//! Kinds of local drivers, as plain data in requests to the launcher.

use k8e_model::Limits;
use serde::{Deserialize, Serialize};

/// Memory of gVisor's sentry, gofer and stub processes, page tables included: 18 MiB idle, more
/// with many processes and open files. Not available to programs.
const KERNEL_MEMORY_BYTES: u64 = 96 * 1024 * 1024;

/// Per CPU of a gVisor sandbox: memory that programs may take beyond the limit until the
/// [out-of-memory killer](super::oom) has killed one. Beyond this the host's OOM killer ends the
/// sandbox. One CPU fills at most 2 GiB a second there, so this is an eighth of a second of it.
const OOM_RESERVE_BYTES_PER_CPU: u64 = 256 * 1024 * 1024;
const OOM_RESERVE_BYTES_MAX: u64 = 1024 * 1024 * 1024;

/// Host threads per process of a gVisor sandbox. The sentry enforces the process limit inside; outside each
/// process is a few threads of a stub: this only bounds a compromised sentry.
const HOST_PIDS_PER_PID: u32 = 4;
const HOST_PIDS_MORE: u32 = 512;

/// A local driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// Namespaces on the host's kernel.
    Native,
    /// gVisor: a user-space kernel for each sandbox.
    Gvisor,
}

// === impl Kind ===

impl Kind {
    /// All kinds.
    pub(crate) const ALL: [Self; 2] = [Self::Native, Self::Gvisor];

    /// The driver's directory below the data directory.
    pub(crate) fn directory(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Gvisor => "gvisor",
        }
    }

    /// Path of the guest's socket in a sandbox's directory.
    pub(crate) fn socket(self) -> &'static str {
        match self {
            // Of a gVisor sandbox: a link to the one that the guest has bound.
            Self::Native | Self::Gvisor => "guest.sock",
        }
    }

    /// Whether each sandbox has a separate kernel, which enforces some limits inside.
    pub(crate) fn has_kernel(self) -> bool {
        match self {
            Self::Native => false,
            Self::Gvisor => true,
        }
    }

    /// Limits of the control group around a sandbox with `limits`.
    pub(crate) fn host_limits(self, limits: &Limits) -> Limits {
        match self {
            Self::Native => *limits,
            Self::Gvisor => Limits {
                memory_bytes: limits
                    .memory_bytes
                    .saturating_add(KERNEL_MEMORY_BYTES)
                    .saturating_add(oom_reserve_bytes(limits)),
                pids: limits
                    .pids
                    .saturating_mul(HOST_PIDS_PER_PID)
                    .saturating_add(HOST_PIDS_MORE),
                ..*limits
            },
        }
    }

    /// v2: `memory.high`, above which the kernel throttles allocations, so that the out-of-memory
    /// killer is in time. None where the host's own OOM killer is used.
    pub(crate) fn memory_high(self, limits: &Limits) -> Option<u64> {
        self.has_kernel()
            .then(|| limits.memory_bytes.saturating_add(KERNEL_MEMORY_BYTES))
    }
}

/// Memory that a gVisor sandbox may use beyond its limit until a process is killed.
pub(crate) fn oom_reserve_bytes(limits: &Limits) -> u64 {
    let cpus = u64::from(limits.cpu_millis.div_ceil(1000).max(1));
    OOM_RESERVE_BYTES_PER_CPU
        .saturating_mul(cpus)
        .min(OOM_RESERVE_BYTES_MAX)
}
