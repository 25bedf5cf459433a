//! The process that unpacks one layer: it reads hostile bytes and has nothing but the directory that it
//! fills.
//!
//! Flow: new mount, network, PID, IPC and UTS namespaces · the directory becomes `/` · everything else
//! is closed · enter a user namespace whose users nothing on the host has · give up capabilities ·
//! resource limits · seccomp · unpack · report · end.

use crate::DriverError;
use crate::local::launcher::Failure;
use crate::local::rootfs::{attach, clone_mount};
use crate::local::sys::{self, Fork};
use crate::local::userns::user_namespace;
use crate::local::{caps, uids};
use k8e_image::{Compression, ImageError, LayerLimits, Unpacked};
use k8e_model::Code;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountPropagationFlags, UnmountFlags};
use rustix::process::{Gid, Resource, Rlimit, Signal, Uid};
use rustix::thread::LinkNameSpaceType;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// A gigabyte takes some ten seconds.
const DEADLINE: Duration = Duration::from_secs(15 * 60);

/// The window of zstd, buffers, and the times of a million directories.
const MEMORY_BYTES_MAX: u64 = 1024 * 1024 * 1024;

/// A directory that is replaced is removed with two for each level: 128 of them, and some.
const OPEN_FILES_MAX: u64 = 320;

/// Of a report: an error names a path or two.
const REPORT_BYTES_MAX: u64 = 64 * 1024;

const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS;

/// What it needs to read one file and to write others. No `execve`, no `clone`, no `socket`, no `mount`.
const ALLOWED: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_lseek,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_getdents64,
    libc::SYS_fcntl,
    libc::SYS_ftruncate,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_symlinkat,
    libc::SYS_linkat,
    libc::SYS_unlinkat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fchmod,
    libc::SYS_fsetxattr,
    libc::SYS_utimensat,
    libc::SYS_syncfs,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// What the process says last.
#[derive(Serialize, Deserialize)]
enum Report {
    Unpacked(Unpacked),
    /// The layer is not one.
    Refused(String),
    /// It is too large, or the disk is full.
    Exhausted(String),
    Failed(Failure),
}

/// What the process is for.
struct Task<'a> {
    compression: Compression,
    files: &'a Path,
    stage: &'a Path,
    limits: LayerLimits,
    filter: &'a BpfProgram,
}

/// Unpacks `blob` into the directory `files`, which belongs to [`uids::LAYERS`]. `stage` is an empty
/// directory to mount on.
pub(super) fn unpack(
    blob: OwnedFd,
    compression: Compression,
    files: &Path,
    stage: &Path,
    limits: LayerLimits,
) -> Result<Unpacked, DriverError> {
    let userns = user_namespace(uids::LAYERS)?;
    let filter = &filter()?;
    let task = Task {
        compression,
        files,
        stage,
        limits,
        filter,
    };
    let (report, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(DriverError::step("make", "a pipe"))?;
    let forked = sys::fork_into(u64::from(NAMESPACES.unsigned_abs()), None);
    match forked.map_err(DriverError::step("fork", "the unpacker"))? {
        Fork::Child => {
            // A pipe without a report says enough. Nothing of the launcher runs again in this process.
            let _ = catch_unwind(AssertUnwindSafe(|| confined(task, blob, theirs, userns)));
            sys::exit_now(0)
        }
        Fork::Parent { pidfd, .. } => {
            drop((theirs, blob));
            let said = read_report(report);
            // Whether it said something or not: it is over.
            let _ = rustix::process::pidfd_send_signal(&pidfd, Signal::KILL);
            match said? {
                Report::Unpacked(unpacked) => Ok(unpacked),
                Report::Refused(why) => Err(DriverError::Refused(why)),
                Report::Exhausted(why) => Err(DriverError::Exhausted(why)),
                Report::Failed(failure) => Err(failure.into_error()),
            }
        }
    }
}

/// What the process says until the deadline.
fn read_report(pipe: OwnedFd) -> Result<Report, DriverError> {
    let step = || DriverError::step::<io::Error>("unpack", "the layer");
    let until = Instant::now() + DEADLINE;
    let mut said = Vec::new();
    let mut pipe = File::from(pipe);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let ready = poll(&mut [PollFd::new(&pipe, PollFlags::IN)], Some(&left));
        match ready {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(0) => {
                return Err(DriverError::Exhausted(format!(
                    "the layer was not unpacked within {DEADLINE:?}"
                )));
            }
            ready => ready.map_err(|error| step()(error.into()))?,
        };
        let mut part = [0; 4096];
        match pipe.read(&mut part).map_err(step())? {
            0 => break,
            read => said.extend_from_slice(&part[..read]),
        }
        if said.len() as u64 > REPORT_BYTES_MAX {
            break;
        }
    }
    serde_json::from_slice(&said).map_err(|_| {
        DriverError::Refused(
            "the layer cannot be unpacked: the process that did it ended, at a limit of memory or time".to_owned(),
        )
    })
}

fn confined(
    task: Task<'_>,
    blob: OwnedFd,
    report: OwnedFd,
    userns: OwnedFd,
) -> Result<(), DriverError> {
    let step = || DriverError::step::<io::Error>("close", "descriptors");
    let null = File::options().read(true).write(true).open("/dev/null");
    let null = null.map_err(DriverError::step("open", "/dev/null"))?;
    for done in [
        rustix::stdio::dup2_stdin(&null),
        rustix::stdio::dup2_stdout(&null),
        rustix::stdio::dup2_stderr(&null),
    ] {
        done.map_err(DriverError::step("set", "standard streams"))?;
    }
    let [blob, report, userns] = sys::keep_only([blob, report, userns]).map_err(step())?;
    let said = match enter(&task).and_then(|root| confine(&task, userns).map(|()| root)) {
        Err(error) => Report::Failed(Failure::from(&error)),
        Ok(root) => {
            let blob = File::from(blob);
            match k8e_image::unpack(blob, task.compression, root, task.limits) {
                Ok(unpacked) => Report::Unpacked(unpacked),
                Err(error) => failed(&error),
            }
        }
    };
    let said = serde_json::to_vec(&said).map_err(io::Error::other);
    said.and_then(|said| File::from(report).write_all(&said))
        .map_err(DriverError::step("write", "a report"))
}

fn failed(error: &ImageError) -> Report {
    match error.code() == Code::Exhausted {
        true => Report::Exhausted(error.to_string()),
        false => Report::Refused(error.to_string()),
    }
}

/// Makes the directory `/`, and the only thing there is.
fn enter(task: &Task<'_>) -> Result<OwnedFd, DriverError> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).map_err(DriverError::step("make private", "/"))?;
    let tree = clone_mount(task.files)?;
    let attributes = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
    sys::set_mount_attributes(tree.as_fd(), attributes, None).map_err(DriverError::step(
        "protect",
        task.files.display().to_string(),
    ))?;
    attach(&tree, task.stage)?;
    drop(tree);
    rustix::process::chdir(task.stage).map_err(DriverError::step("enter", "the layer"))?;
    rustix::process::pivot_root(".", ".").map_err(DriverError::step("pivot to", "the layer"))?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)
        .map_err(DriverError::step("leave", "the old root"))?;
    rustix::process::chdir("/").map_err(DriverError::step("enter", "/"))?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open("/", flags, Mode::empty()).map_err(DriverError::step("open", "the layer"))
}

/// Gives up everything that is not needed to unpack.
fn confine(task: &Task<'_>, userns: OwnedFd) -> Result<(), DriverError> {
    rustix::thread::move_into_link_name_space(userns.as_fd(), Some(LinkNameSpaceType::User))
        .map_err(DriverError::step("enter", "the user namespace"))?;
    drop(userns);
    let step = || DriverError::step::<rustix::io::Errno>("become", "root of the layer");
    rustix::thread::set_thread_groups(&[]).map_err(step())?;
    rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT).map_err(step())?;
    rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).map_err(step())?;
    caps::drop_all_but(caps::UNPACKER).map_err(DriverError::step("drop", "capabilities"))?;
    rustix::thread::set_no_new_privs(true).map_err(DriverError::step("set", "no_new_privs"))?;
    rustix::process::umask(Mode::empty());
    // A change of user took it away.
    sys::end_with_parent().map_err(DriverError::step("prepare", "the unpacker"))?;
    let limits = [
        (Resource::As, MEMORY_BYTES_MAX),
        (Resource::Fsize, task.limits.bytes_max),
        (Resource::Nofile, OPEN_FILES_MAX),
        (Resource::Cpu, DEADLINE.as_secs()),
        (Resource::Core, 0),
    ];
    for (resource, limit) in limits {
        let limit = Rlimit {
            current: Some(limit),
            maximum: Some(limit),
        };
        rustix::process::setrlimit(resource, limit)
            .map_err(DriverError::step("limit", format!("{resource:?}")))?;
    }
    let applied = seccompiler::apply_filter(task.filter);
    applied.map_err(|error| DriverError::step("apply", "seccomp")(io::Error::other(error)))
}

fn filter() -> Result<BpfProgram, DriverError> {
    let compile = || -> Result<BpfProgram, seccompiler::BackendError> {
        SeccompFilter::new(
            ALLOWED.iter().map(|call| (*call, Vec::new())).collect(),
            SeccompAction::Errno(libc::EPERM.unsigned_abs()),
            SeccompAction::Allow,
            TargetArch::try_from(std::env::consts::ARCH)?,
        )?
        .try_into()
    };
    compile().map_err(|error| DriverError::step("compile", "seccomp")(io::Error::other(error)))
}
