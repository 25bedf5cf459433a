//! The `host` template: which directories of the host a sandbox sees, and the minimal rest around them.
//!
//! The host's programs come as read-only lower layers. Everything else is made here once per
//! server start: an empty `/root`, `/home`, `/var`, and an `/etc` with only what programs need to
//! start (users, the linker's cache, alternatives, certificates, time zone). No secrets, no keys.
//! Package managers are set up for a sandbox: pip and npm install as typed, the system's own says
//! why it cannot.

use crate::DriverError;
use k8e_egress::tproxy;
use serde::{Deserialize, Serialize};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};

/// Directories of the host that hold programs. Where one is a link, the link is made instead.
const PROGRAMS: [&str; 9] = [
    "usr", "opt", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec",
];

/// Files of the host's `/etc` that programs need and that hold no secrets.
/// A trailing `*` takes every name that starts so.
const ETC: [&str; 27] = [
    "alternatives",
    "bash.bashrc",
    "ca-certificates.conf",
    "debian_version",
    "default/useradd",
    "fonts",
    "gai.conf",
    "host.conf",
    "java-*",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "login.defs",
    "magic",
    "mime.types",
    "netconfig",
    "pam.d",
    "perl",
    "pki/tls/certs",
    "protocols",
    "python3*",
    "security",
    "services",
    "skel",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
];

/// Bound on copied files: certificates, alternatives and fonts are a few hundred.
const ETC_FILES_MAX: usize = 20_000;
const ETC_FILE_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// The user that `/etc/passwd` names beside root.
const USER: u32 = 1000;

/// Directories that every system has, and their modes.
const DIRECTORIES: [(&str, u32); 21] = [
    ("dev", 0o755),
    ("etc", 0o755),
    ("etc/k8e", 0o755),
    ("etc/k8e/bin", 0o755),
    ("home", 0o755),
    ("home/user", 0o755),
    ("mnt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("run/lock", 0o1777),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("var", 0o755),
    ("var/cache", 0o755),
    ("var/lib", 0o755),
    ("var/log", 0o755),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
    ("workspace", 0o755),
];

/// No passwords: there is no shadow file.
const FILES: [(&str, &str); 9] = [
    (
        "etc/passwd",
        "root:*:0:0:root:/root:/bin/bash\ndaemon:*:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n\
         user:*:1000:1000:user:/home/user:/bin/bash\n_apt:*:42:65534::/nonexistent:/usr/sbin/nologin\n\
         nobody:*:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    ),
    (
        "etc/group",
        "root:x:0:\ndaemon:x:1:\ntty:x:5:\nstaff:x:50:\nuser:x:1000:\nnogroup:x:65534:\n",
    ),
    (
        "etc/hosts",
        "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n",
    ),
    (
        "etc/nsswitch.conf",
        "passwd: files\ngroup: files\nhosts: files dns\n",
    ),
    ("etc/shells", "/bin/sh\n/bin/bash\n"),
    (
        "etc/profile",
        "export PATH=$HOME/.local/bin:/etc/k8e/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n",
    ),
    ("etc/pip.conf", PIP),
    ("root/.npmrc", NPM),
    ("home/user/.npmrc", NPM),
];

/// A sandbox has no other users whose system an installation could break (PEP 668), and its root is not
/// the host's. With more retries a host that is not allowed fails after 9 seconds instead of one.
const PIP: &str = "\
[global]
break-system-packages = true
root-user-action = ignore
disable-pip-version-check = true
retries = 2
";

/// npm asks again also for a name that does not exist, by default after 10 and 60 seconds.
const NPM: &str = "\
fetch-retries=2
fetch-retry-factor=2
fetch-retry-mintimeout=500
fetch-retry-maxtimeout=2000
update-notifier=false
";

/// Package managers of the system. Those that the host has are replaced by [`CANNOT_INSTALL`].
const PACKAGE_MANAGERS: [&str; 8] = [
    "apk", "apt", "apt-get", "aptitude", "dnf", "pacman", "yum", "zypper",
];

/// Stub in place of the system's package manager, first in PATH.
const CANNOT_INSTALL: &str = "\
#!/bin/sh
echo \"${0##*/}: system packages cannot be installed in this sandbox: its /usr is the host's, without the database \
of packages. Use pip or npm, or install the package on the machine that runs k8e server: new sessions have it.\" >&2
exit 1
";

const LINKS: [(&str, &str); 4] = [
    ("etc/mtab", "/proc/self/mounts"),
    ("etc/localtime", "/usr/share/zoneinfo/UTC"),
    ("etc/os-release", "../usr/lib/os-release"),
    ("var/run", "/run"),
];

/// A directory of the host that becomes a read-only lower layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layer {
    /// In the sandbox, below `/`.
    pub(crate) name: String,
    /// Path on the host.
    pub(crate) host: PathBuf,
}

/// The directories of this host that hold programs.
pub(crate) fn layers() -> Vec<Layer> {
    let real = |name: &&str| {
        fs::symlink_metadata(Path::new("/").join(name)).is_ok_and(|meta| meta.is_dir())
    };
    let layer = |name: &str| Layer {
        name: name.to_owned(),
        host: Path::new("/").join(name),
    };
    PROGRAMS
        .iter()
        .filter(|name| real(name))
        .map(|name| layer(name))
        .collect()
}

/// Directories that are mounted on or written to from outside: an image's own of these names are never
/// used for that.
const FRONT: [(&str, u32); 10] = [
    ("dev", 0o755),
    ("etc", 0o755),
    ("proc", 0o555),
    ("run", 0o755),
    ("run/k8e", 0o755),
    ("run/k8e/shared", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("tmp/.X11-unix", 0o1777),
    ("workspace", 0o755),
];

/// Of those, the ones in which nothing of an image is to be seen.
const FRONT_OPAQUE: [&str; 3] = ["run/k8e", "run/k8e/shared", "tmp/.X11-unix"];

/// Makes what is above the layers of every image, at `dir`, anew.
pub(crate) fn build_front(dir: &Path) -> Result<(), DriverError> {
    build_front_io(dir).map_err(DriverError::step("make", dir.display().to_string()))
}

fn build_front_io(dir: &Path) -> io::Result<()> {
    start_anew(dir)?;
    for (name, mode) in FRONT {
        make_dir(&dir.join(name), mode)?;
    }
    for name in FRONT_OPAQUE {
        let flags = rustix::fs::XattrFlags::empty();
        let set = rustix::fs::setxattr(dir.join(name), "user.overlay.opaque", b"y", flags);
        match set {
            // Without attributes there are no images either, which is said where one is used.
            Err(rustix::io::Errno::OPNOTSUPP) => {}
            set => set?,
        }
    }
    let hosts = FILES.into_iter().find(|(name, _)| *name == "etc/hosts");
    for (name, text) in hosts
        .into_iter()
        .chain([("etc/resolv.conf", resolver().as_str())])
    {
        write_file(&dir.join(name), text, 0o644)?;
    }
    Ok(())
}

/// Answers are quick or will not come; the gate does the waiting.
fn resolver() -> String {
    format!(
        "nameserver {}\noptions timeout:10 attempts:1\n",
        tproxy::GATEWAY
    )
}

fn start_anew(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        done => done?,
    }
    fs::create_dir_all(dir)?;
    fs::set_permissions(dir, Permissions::from_mode(0o755))
}

/// Makes everything but the layers, at `dir`, anew.
pub(crate) fn build(dir: &Path) -> Result<(), DriverError> {
    build_io(dir).map_err(DriverError::step("make", dir.display().to_string()))
}

fn build_io(dir: &Path) -> io::Result<()> {
    start_anew(dir)?;
    for (name, mode) in DIRECTORIES {
        make_dir(&dir.join(name), mode)?;
    }
    chown(dir.join("home/user"), Some(USER), Some(USER))?;
    for name in PROGRAMS {
        match fs::symlink_metadata(Path::new("/").join(name)) {
            Ok(meta) if meta.is_dir() => make_dir(&dir.join(name), 0o755)?,
            Ok(meta) if meta.is_symlink() => {
                symlink(fs::read_link(Path::new("/").join(name))?, dir.join(name))?
            }
            _ => {}
        }
    }
    let mut left = ETC_FILES_MAX;
    for pattern in ETC {
        copy_matching(Path::new("/etc"), pattern, &dir.join("etc"), &mut left)?;
    }
    let resolver = resolver();
    let resolver = ("etc/resolv.conf", resolver.as_str());
    for (name, text) in FILES.into_iter().chain([resolver]) {
        write_file(&dir.join(name), text, 0o644)?;
    }
    chown(dir.join("home/user/.npmrc"), Some(USER), Some(USER))?;
    for name in PACKAGE_MANAGERS {
        let is_there = |bin: &str| Path::new("/").join(bin).join(name).exists();
        if ["usr/bin", "usr/sbin", "bin", "sbin"]
            .into_iter()
            .any(is_there)
        {
            write_file(&dir.join("etc/k8e/bin").join(name), CANNOT_INSTALL, 0o755)?;
        }
    }
    for (name, target) in LINKS {
        symlink(target, dir.join(name))?;
    }
    Ok(())
}

fn write_file(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    fs::write(path, text)?;
    // Regardless of the umask.
    fs::set_permissions(path, Permissions::from_mode(mode))
}

fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        done => done?,
    }
    // Regardless of the umask.
    fs::set_permissions(path, Permissions::from_mode(mode))
}

fn copy_matching(from: &Path, pattern: &str, to: &Path, left: &mut usize) -> io::Result<()> {
    if let Some((parent, rest)) = pattern.split_once('/') {
        let real = fs::symlink_metadata(from.join(parent)).is_ok_and(|meta| meta.is_dir());
        return if real {
            with_dir(&to.join(parent), |to| {
                copy_matching(&from.join(parent), rest, to, left)
            })
        } else {
            Ok(())
        };
    }
    let Some(prefix) = pattern.strip_suffix('*') else {
        return copy(&from.join(pattern), &to.join(pattern), left);
    };
    for entry in fs::read_dir(from)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            copy(&entry.path(), &to.join(entry.file_name()), left)?;
        }
    }
    Ok(())
}

fn with_dir(path: &Path, fill: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    make_dir(path, 0o755)?;
    fill(path)
}

/// Copies files that every user of the host may read; symbolic links stay links.
fn copy(from: &Path, to: &Path, left: &mut usize) -> io::Result<()> {
    let Ok(meta) = fs::symlink_metadata(from) else {
        return Ok(());
    };
    let Some(next) = left.checked_sub(1) else {
        return Ok(());
    };
    *left = next;
    let readable = meta.permissions().mode() & 0o004 != 0;
    if meta.is_symlink() {
        symlink(fs::read_link(from)?, to)
    } else if meta.is_dir() && readable {
        with_dir(to, |to| {
            for entry in fs::read_dir(from)?.flatten() {
                copy(&entry.path(), &to.join(entry.file_name()), left)?;
            }
            Ok(())
        })
    } else if meta.is_file() && readable && meta.len() <= ETC_FILE_BYTES_MAX {
        fs::copy(from, to)?;
        fs::set_permissions(
            to,
            Permissions::from_mode(0o644 | meta.permissions().mode() & 0o111),
        )
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skeleton_has_no_secrets_and_can_be_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("host");
        build(&root).unwrap();
        build(&root).unwrap();
        for absent in [
            "etc/shadow",
            "etc/ssh",
            "etc/ssl/private",
            "etc/sudoers",
            "var/lib/dpkg",
            "etc/machine-id",
        ] {
            assert!(!root.join(absent).exists(), "{absent}");
        }
        assert_eq!(
            fs::metadata(root.join("tmp")).unwrap().permissions().mode() & 0o7777,
            0o1777
        );
        assert_eq!(
            fs::metadata(root.join("root"))
                .unwrap()
                .permissions()
                .mode()
                & 0o7777,
            0o700
        );
        assert!(
            fs::read_to_string(root.join("etc/passwd"))
                .unwrap()
                .starts_with("root:*:0:0")
        );
        assert!(layers().iter().any(|layer| layer.name == "usr"));
        let wrapper = |name: &str| root.join("etc/k8e/bin").join(name);
        let host_has = |name: &str| Path::new("/usr/bin").join(name).exists();
        for name in ["apt-get", "dnf"] {
            assert_eq!(wrapper(name).exists(), host_has(name), "{name}");
        }
    }

    #[test]
    fn only_what_everybody_may_read_is_copied() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir_all(from.join("sub")).unwrap();
        fs::create_dir(&to).unwrap();
        fs::write(from.join("open"), "1").unwrap();
        fs::write(from.join("secret"), "2").unwrap();
        fs::set_permissions(from.join("secret"), Permissions::from_mode(0o600)).unwrap();
        symlink("/etc/shadow", from.join("sub/link")).unwrap();
        let mut left = 100;
        for pattern in ["open", "secret", "su*", "missing"] {
            copy_matching(&from, pattern, &to, &mut left).unwrap();
        }
        assert!(to.join("open").is_file());
        assert!(!to.join("secret").exists());
        assert!(
            fs::symlink_metadata(to.join("sub/link"))
                .unwrap()
                .is_symlink()
        );
    }
}
