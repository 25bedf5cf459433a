//! The data directory: there, writable, and closed to every user but root.
//!
//! Keys, the database and disk images are in it, so one that another user owns, or could write to,
//! is refused rather than used.

use super::args;
use super::error::Error;
use super::user::ServerUser;
use rustix::fs::{Gid, Mode, OFlags};
use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// In the data directory: what the store keeps.
const STORE: &str = "store";
const STORE_FILES: [&str; 5] = [
    "k8e.db",
    "k8e.db-wal",
    "k8e.db-shm",
    "transcripts",
    "secrets.key",
];

/// Root alone; and with the group passing through to the socket.
const MODE: u32 = 0o700;
const MODE_WITH_GROUP: u32 = 0o710;

/// What others than the owner can write to.
const OTHERS_WRITE: u32 = 0o022;

/// A directory that we can write, and nobody else.
pub(super) struct DataDir(PathBuf);

// === impl DataDir ===

impl DataDir {
    /// Makes it when it is missing. Members of the socket's group may pass through it, no more. One
    /// that is there gets that mode, or is refused where that would not make it safe.
    pub(super) fn prepare(path: &Path) -> Result<Self, Error> {
        // Without a slash at the end, which would follow a symbolic link.
        let given = Self(path.components().as_path().to_owned());
        if given.0.is_symlink() {
            return Err(given.unsafe_because(
                "it is a symbolic link: name the directory that it leads to".to_owned(),
            ));
        }
        let create = || -> io::Result<(OwnedFd, PathBuf)> {
            // Those above are ordinary directories: the server, which is not root, passes through.
            if let Some(above) = path.parent() {
                std::fs::create_dir_all(above)?;
            }
            DirBuilder::new().recursive(true).mode(MODE).create(path)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = rustix::fs::open(&given.0, flags, Mode::empty())?;
            // Absolute from here on: the launcher has another working directory.
            Ok((opened, given.0.canonicalize()?))
        };
        let (opened, absolute) = create().map_err(|source| given.failed("make", source))?;
        let dir = Self(absolute);
        dir.close_to_others(&opened)?;
        Ok(dir)
    }

    /// Where the store keeps its files.
    pub(super) fn store(&self) -> PathBuf {
        self.0.join(STORE)
    }

    /// Where certificates and their keys are.
    fn tls(&self) -> PathBuf {
        self.0.join(args::TLS)
    }

    /// Everything that the server writes is below one of these.
    pub(super) fn servers(&self) -> [PathBuf; 3] {
        let links = self.0.join(args::TLS_LINKS);
        let links = links.parent().map(Path::to_owned).unwrap_or(links);
        [self.store(), self.tls(), links]
    }

    /// Makes what the server writes its own, and lets it, and members of the socket's group, pass
    /// through this directory. The directory itself stays root's: nothing in it can be replaced.
    pub(super) fn give_to(&self, user: &ServerUser) -> Result<(), Error> {
        self.move_store()
            .map_err(|source| self.failed("move the store in", source))?;
        for dir in self.servers() {
            user.own(&dir)
                .map_err(|source| self.failed("prepare", source))?;
        }
        if args::socket_group().is_some() {
            // Passes as a member of the group that may use the socket.
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let pass = || -> io::Result<()> {
            let opened = rustix::fs::open(&self.0, flags, Mode::empty())?;
            self.set_mode(&opened, Some(user.gid), MODE_WITH_GROUP)
        };
        pass().map_err(|source| self.failed("set the permissions of", source))
    }

    /// Earlier servers kept these in the data directory itself.
    fn move_store(&self) -> io::Result<()> {
        let store = self.store();
        if store.exists() || !self.0.join("k8e.db").exists() {
            return Ok(());
        }
        DirBuilder::new().mode(0o700).create(&store)?;
        for name in STORE_FILES {
            match std::fs::rename(self.0.join(name), store.join(name)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                done => done?,
            }
        }
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn failed(&self, operation: &'static str, source: io::Error) -> Error {
        Error::DataDir {
            operation,
            path: self.0.clone(),
            source,
        }
    }

    fn unsafe_because(&self, why: String) -> Error {
        Error::UnsafeDataDir {
            path: self.0.clone(),
            why,
        }
    }

    /// Sets owner, group and mode of an open directory, or says why it cannot be ours.
    fn close_to_others(&self, opened: &OwnedFd) -> Result<(), Error> {
        let failed = |errno: rustix::io::Errno| self.failed("read", errno.into());
        let was = rustix::fs::fstat(opened).map_err(failed)?;
        let own = rustix::process::geteuid().as_raw();
        if was.st_uid != own {
            return Err(self.unsafe_because(format!(
                "it belongs to user {}, who can read and change all that is in it: choose another, or `chown -R root` it after a look inside",
                was.st_uid
            )));
        }
        if was.st_mode & OTHERS_WRITE != 0 {
            self.refuse_entries_of_others(own)?;
        }
        // A server that runs on it now must not be shut out before the lock says that it does.
        let servers = Some(was.st_gid).filter(|gid| ServerUser::is_one(*gid));
        let group = args::socket_group().or(servers);
        let mode = group.map_or(MODE, |_| MODE_WITH_GROUP);
        self.set_mode(opened, group, mode)
            .map_err(|source| self.failed("set the permissions of", source))?;
        let is = rustix::fs::fstat(opened).map_err(failed)?.st_mode & 0o7777;
        if is != mode {
            return Err(self.unsafe_because(format!(
                "its mode is {is:04o} and cannot be made {mode:04o}: choose one on a file system that keeps modes"
            )));
        }
        let before = was.st_mode & 0o7777;
        if before & 0o077 & !mode != 0 {
            tracing::warn!(
                "the data directory {} had mode {before:04o}, which let other users in: it has {mode:04o} now",
                self.0.display()
            );
        }
        Ok(())
    }

    fn set_mode(&self, opened: &OwnedFd, group: Option<u32>, mode: u32) -> io::Result<()> {
        if let Some(gid) = group {
            rustix::fs::fchown(opened, None, Some(Gid::from_raw(gid)))?;
        }
        rustix::fs::fchmod(opened, Mode::from_raw_mode(mode))?;
        Ok(())
    }

    /// What somebody else put into a directory that was open to everybody could be a key or a
    /// database of theirs.
    fn refuse_entries_of_others(&self, own: u32) -> Result<(), Error> {
        let failed = |source| self.failed("list", source);
        for entry in self.0.read_dir().map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let owner = entry.metadata().map_err(failed)?.uid();
            if owner != own && !ServerUser::is_one(owner) {
                return Err(self.unsafe_because(format!(
                    "other users could write to it, and {:?} in it belongs to user {owner}: choose another, or remove what is not root's",
                    entry.file_name()
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    const NOBODY: u32 = 65534;

    /// A directory in a directory, with a mode.
    fn dir(mode: u32) -> (tempfile::TempDir, PathBuf) {
        let above = tempfile::tempdir().unwrap();
        let path = above.path().join("data");
        std::fs::create_dir(&path).unwrap();
        chmod(&path, mode);
        (above, path)
    }

    fn chmod(path: &Path, mode: u32) {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(path, mode).unwrap();
    }

    fn give_to_nobody(path: &Path) {
        let root = rustix::process::geteuid().is_root();
        assert!(root, "this test needs root: it gives files to others");
        std::os::unix::fs::lchown(path, Some(NOBODY), None).unwrap();
    }

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().mode() & 0o7777
    }

    #[track_caller]
    fn refused(path: &Path, says: &str) {
        let Err(error) = DataDir::prepare(path) else {
            panic!("{} is taken", path.display())
        };
        let text = error.to_string();
        assert!(text.contains(says) && text.contains("--data-dir"), "{text}");
    }

    #[test]
    fn one_that_is_too_open_is_closed() {
        let wanted = args::socket_group().map_or(MODE, |_| MODE_WITH_GROUP);
        for before in [0o777, 0o1777, 0o755, 0o2770, 0o700] {
            let (_above, path) = dir(before);
            std::fs::write(path.join("k8e.db"), "ours").unwrap();
            DataDir::prepare(&path).unwrap();
            assert_eq!(mode(&path), wanted, "{before:o}");
            DataDir::prepare(&path).unwrap();
        }
        let above = tempfile::tempdir().unwrap();
        let missing = above.path().join("a/b");
        DataDir::prepare(&missing).unwrap();
        assert_eq!(mode(&missing), wanted);
    }

    #[test]
    fn another_users_is_refused() {
        let (_above, path) = dir(0o700);
        give_to_nobody(&path);
        refused(&path, "belongs to user 65534");
        assert_eq!(mode(&path), 0o700, "it is left as it is");
    }

    #[test]
    fn what_others_put_into_an_open_one_is_not_used() {
        let (_above, path) = dir(0o777);
        let planted = path.join("k8e.db");
        symlink("/etc/passwd", &planted).unwrap();
        give_to_nobody(&planted);
        refused(&path, "\"k8e.db\" in it belongs to user 65534");
        // In one that was closed, only root can have given a file away.
        chmod(&path, 0o700);
        DataDir::prepare(&path).unwrap();
    }

    #[test]
    fn a_symbolic_link_is_refused() {
        let (above, path) = dir(0o700);
        let link = above.path().join("link");
        symlink(&path, &link).unwrap();
        refused(&link, "symbolic link");
        refused(&above.path().join("link/"), "symbolic link");
        refused(&above.path().join("link/."), "symbolic link");
        let dangling = above.path().join("dangling");
        symlink("nowhere", &dangling).unwrap();
        refused(&dangling, "symbolic link");
        // A link on the way is the operator's to make.
        let way = above.path().join("way");
        symlink(above.path(), &way).unwrap();
        DataDir::prepare(&way.join("data")).unwrap();
    }

    #[test]
    fn one_whose_mode_cannot_be_set_is_refused() {
        refused(Path::new("/proc/sys"), "permissions of");
    }
}
