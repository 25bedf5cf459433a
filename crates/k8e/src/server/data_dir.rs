//! The data directory: created if missing, and its owner and permissions checked.
//!
//! It holds keys, the database and disk images, so a directory that another user owns or can write to is refused.

use super::args;
use super::error::Error;
use super::user::ServerUser;
use rustix::fs::{Gid, Mode, OFlags};
use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// Subdirectory of the data directory with the files of the store, and their names.
const STORE: &str = "store";
const STORE_FILES: [&str; 5] = [
    "k8e.db",
    "k8e.db-wal",
    "k8e.db-shm",
    "transcripts",
    "secrets.key",
];

/// Mode of the data directory: root only, or passable for the group that may connect to the socket.
const MODE: u32 = 0o700;
const MODE_WITH_GROUP: u32 = 0o710;

/// Write permissions of group and others.
const OTHERS_WRITE: u32 = 0o022;

/// A data directory that only root can write.
pub(super) struct DataDir(PathBuf);

// === impl DataDir ===

impl DataDir {
    /// Creates it if it is missing. An existing one gets the same mode (members of the socket's group may pass through, no
    /// more), or is refused where that would not make it safe.
    pub(super) fn prepare(path: &Path) -> Result<Self, Error> {
        // Without a slash at the end, which would follow a symbolic link.
        let given = Self(path.components().as_path().to_owned());
        if given.0.is_symlink() {
            return Err(given.unsafe_because(
                "it is a symbolic link: name the directory that it leads to".to_owned(),
            ));
        }
        let create = || -> io::Result<(OwnedFd, PathBuf)> {
            // Parents get the default mode: the server, which is not root, must pass through them.
            if let Some(above) = path.parent() {
                std::fs::create_dir_all(above)?;
            }
            DirBuilder::new().recursive(true).mode(MODE).create(path)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = rustix::fs::open(&given.0, flags, Mode::empty())?;
            // Absolute, because the launcher has another working directory.
            Ok((opened, given.0.canonicalize()?))
        };
        let (opened, absolute) = create().map_err(|source| given.failed("make", source))?;
        let dir = Self(absolute);
        dir.close_to_others(&opened)?;
        Ok(dir)
    }

    /// Directory of the store.
    pub(super) fn store(&self) -> PathBuf {
        self.0.join(STORE)
    }

    /// Directory of certificates and their keys.
    fn tls(&self) -> PathBuf {
        self.0.join(args::TLS)
    }

    /// The directories that the unprivileged server may write to.
    pub(super) fn servers(&self) -> [PathBuf; 3] {
        let links = self.0.join(args::TLS_LINKS);
        let links = links.parent().map(Path::to_owned).unwrap_or(links);
        [self.store(), self.tls(), links]
    }

    /// Makes the server's user the owner of the directories it writes, and lets it and the socket's group pass through this
    /// one. The directory itself stays owned by root, so that nothing in it can be replaced.
    pub(super) fn give_to(&self, user: &ServerUser) -> Result<(), Error> {
        self.move_store()
            .map_err(|source| self.failed("move the store in", source))?;
        for dir in self.servers() {
            user.own(&dir)
                .map_err(|source| self.failed("prepare", source))?;
        }
        if args::socket_group().is_some() {
            // The server's user is in that group, which may pass through.
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let pass = || -> io::Result<()> {
            let opened = rustix::fs::open(&self.0, flags, Mode::empty())?;
            self.set_mode(&opened, Some(user.gid), MODE_WITH_GROUP)
        };
        pass().map_err(|source| self.failed("set the permissions of", source))
    }

    /// Migrates the layout of earlier versions, which kept the store's files in the data directory itself.
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

    /// Checks the owner of an open directory and sets its group and mode, or says why it is not safe to use.
    fn close_to_others(&self, opened: &OwnedFd) -> Result<(), Error> {
        let failed = |errno: rustix::io::Errno| self.failed("read", errno.into());
        let was = rustix::fs::fstat(opened).map_err(failed)?;
        let own = rustix::process::geteuid().as_raw();
        if was.st_uid != own {
            return Err(self.unsafe_because(format!(
                "it is owned by uid {}, who can read and change everything in it: choose another, or check its content and `chown -R root` it",
                was.st_uid
            )));
        }
        if was.st_mode & OTHERS_WRITE != 0 {
            self.refuse_entries_of_others(own)?;
        }
        // Keeps the group of a server that is running on it: whether one is, the lock says later.
        let servers = Some(was.st_gid).filter(|gid| ServerUser::is_one(*gid));
        let group = args::socket_group().or(servers);
        let mode = group.map_or(MODE, |_| MODE_WITH_GROUP);
        self.set_mode(opened, group, mode)
            .map_err(|source| self.failed("set the permissions of", source))?;
        let is = rustix::fs::fstat(opened).map_err(failed)?.st_mode & 0o7777;
        if is != mode {
            return Err(self.unsafe_because(format!(
                "its mode is {is:04o} and cannot be changed to {mode:04o}: choose a directory on a file system with Unix permissions"
            )));
        }
        let before = was.st_mode & 0o7777;
        if before & 0o077 & !mode != 0 {
            tracing::warn!(
                "the data directory {} was open to other users (mode {before:04o}): changed to {mode:04o}",
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

    /// Refuses a directory that was writable for others and has an entry of another user: it could be a key or a database
    /// that an attacker planted.
    fn refuse_entries_of_others(&self, own: u32) -> Result<(), Error> {
        let failed = |source| self.failed("list", source);
        for entry in self.0.read_dir().map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let owner = entry.metadata().map_err(failed)?.uid();
            if owner != own && !ServerUser::is_one(owner) {
                return Err(self.unsafe_because(format!(
                    "it was writable for other users, and {:?} in it is owned by uid {owner}: choose another, or remove what root does not own",
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
    fn another_users_is_refused_as_root() {
        let (_above, path) = dir(0o700);
        give_to_nobody(&path);
        refused(&path, "owned by uid 65534");
        assert_eq!(mode(&path), 0o700, "it is left as it is");
    }

    #[test]
    fn what_others_put_into_an_open_one_is_not_used_as_root() {
        let (_above, path) = dir(0o777);
        let planted = path.join("k8e.db");
        symlink("/etc/passwd", &planted).unwrap();
        give_to_nobody(&planted);
        refused(&path, "\"k8e.db\" in it is owned by uid 65534");
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
