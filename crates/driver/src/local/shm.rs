//! Resizes `/dev/shm` of a live sandbox.

use super::shm_bytes;
use k8e_model::Limits;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::mount::{FsPickFlags, fsconfig_reconfigure, fsconfig_set_string, fspick};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};

/// Magic number of tmpfs in `statfs`.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Resizes `/dev/shm` of the sandbox whose first process is `pid` to the size that a launch with these
/// limits would have given it.
pub(super) fn resize(pid: i32, limits: &Limits) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(format!("/proc/{pid}/root"), flags, Mode::empty())?;
    resize_in(root.as_fd(), shm_bytes(limits))
}

/// Everything below `root` is controlled by the sandbox: no symbolic link is followed, and only the root of a
/// mounted tmpfs is changed.
fn resize_in(root: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let shm = rustix::fs::openat2(
        root,
        "dev/shm",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )?;
    if rustix::fs::fstatfs(&shm)?.f_type != TMPFS_MAGIC {
        return Err(io::Error::other("/dev/shm is not a tmpfs"));
    }
    let flags = FsPickFlags::FSPICK_CLOEXEC
        | FsPickFlags::FSPICK_EMPTY_PATH
        | FsPickFlags::FSPICK_NO_AUTOMOUNT
        | FsPickFlags::FSPICK_SYMLINK_NOFOLLOW;
    let shm = fspick(&shm, "", flags)?;
    fsconfig_set_string(shm.as_fd(), "size", bytes.to_string())?;
    Ok(fsconfig_reconfigure(shm.as_fd())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::rootfs::{SAFE, mount};
    use crate::local::sys;
    use rustix::mount::MountPropagationFlags;
    use rustix::thread::UnshareFlags;
    use std::fs;
    use std::path::Path;

    fn size(path: &Path) -> u64 {
        let stat = rustix::fs::statvfs(path).unwrap();
        stat.f_blocks * stat.f_frsize
    }

    #[test]
    fn a_link_in_place_of_the_directory_leads_nowhere() {
        std::thread::spawn(|| {
            sys::unshare(UnshareFlags::FS | UnshareFlags::NEWNS)
                .expect("this test mounts: run it as root");
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            rustix::mount::mount_change("/", private).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let (hosts, inside) = (dir.path().join("hosts"), dir.path().join("inside"));
            fs::create_dir_all(inside.join("dev/shm")).unwrap();
            fs::create_dir(&hosts).unwrap();
            mount("k8e", &hosts, "tmpfs", SAFE, "size=1m").unwrap();
            mount("k8e", inside.join("dev/shm"), "tmpfs", SAFE, "size=1m").unwrap();
            let root = fs::File::open(&inside).unwrap();
            resize_in(root.as_fd(), 2 << 20).unwrap();
            assert_eq!(size(&inside.join("dev/shm")), 2 << 20);

            // A symbolic link in place of `shm`, and one in place of `dev` that leads to such a directory.
            let link = |to: &Path, from: &Path| std::os::unix::fs::symlink(to, from).unwrap();
            let (evil, worse) = (dir.path().join("evil"), dir.path().join("worse"));
            fs::create_dir_all(evil.join("dev")).unwrap();
            link(&hosts, &evil.join("dev/shm"));
            fs::create_dir_all(&worse).unwrap();
            link(&inside.join("dev"), &worse.join("dev"));
            for root in [evil, worse] {
                let root = fs::File::open(root).unwrap();
                resize_in(root.as_fd(), 4 << 20).unwrap_err();
            }
            assert_eq!(size(&inside.join("dev/shm")), 2 << 20);
            assert_eq!(size(&hosts), 1 << 20, "the host's own was changed");
        })
        .join()
        .unwrap();
    }
}
