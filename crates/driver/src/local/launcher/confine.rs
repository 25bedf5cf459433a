//! seccomp deny list of the launcher: system calls that neither it nor its children ever need.
//!
//! A deny list and not an allow list: the filter is inherited by runsc and by
//! every sandbox, which have allow lists.

use crate::DriverError;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use std::io;

/// Each would give a compromised launcher access to the kernel or to other processes' memory.
const REFUSED: &[i64] = &[
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_syslog,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_open_by_handle_at,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_vhangup,
    libc::SYS_nfsservctl,
    libc::SYS_lookup_dcookie,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

/// Installs the filter on this process, which is single-threaded, and on its future children.
pub(super) fn refuse_calls() -> Result<(), DriverError> {
    let failed = |error: String| DriverError::step("apply", "seccomp")(io::Error::other(error));
    let filter = compile().map_err(|error| failed(error.to_string()))?;
    seccompiler::apply_filter(&filter).map_err(|error| failed(error.to_string()))
}

fn compile() -> Result<BpfProgram, seccompiler::BackendError> {
    SeccompFilter::new(
        REFUSED.iter().map(|call| (*call, Vec::new())).collect(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM.unsigned_abs()),
        TargetArch::try_from(std::env::consts::ARCH)?,
    )?
    .try_into()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_filter_compiles() {
        super::compile().unwrap();
    }
}
