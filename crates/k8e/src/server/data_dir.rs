//! The data directory: there, writable, and nobody else's business.

use super::args;
use super::error::Error;
use super::user::ServerUser;
use rustix::fs::Gid;
use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
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

/// A directory that we can write.
pub(super) struct DataDir(PathBuf);

// === impl DataDir ===

impl DataDir {
    /// Makes it when it is missing, for root alone.
    pub(super) fn prepare(path: &Path) -> Result<Self, Error> {
        let dir = Self(path.to_owned());
        let create = || -> io::Result<PathBuf> {
            // Those above are ordinary directories: the server, which is not root, passes through.
            if let Some(above) = path.parent() {
                std::fs::create_dir_all(above)?;
            }
            DirBuilder::new().recursive(true).mode(0o700).create(path)?;
            // Absolute from here on: the launcher has another working directory.
            path.canonicalize()
        };
        Ok(Self(create().map_err(|source| dir.failed("make", source))?))
    }

    /// Where the store keeps its files.
    pub(super) fn store(&self) -> PathBuf {
        self.0.join(STORE)
    }

    /// Where certificates and their keys are.
    pub(super) fn tls(&self) -> PathBuf {
        self.0.join(args::TLS)
    }

    /// Makes what the server writes its own, and lets it, and members of the socket's group, pass
    /// through this directory. The directory itself stays root's: nothing in it can be replaced.
    pub(super) fn give_to(&self, user: &ServerUser) -> Result<(), Error> {
        self.move_store()
            .map_err(|source| self.failed("move the store in", source))?;
        for dir in [self.store(), self.tls()] {
            user.own(&dir)
                .map_err(|source| self.failed("prepare", source))?;
        }
        self.let_group_pass(args::socket_group().unwrap_or(user.gid))
            .map_err(|source| self.failed("set the permissions of", source))
    }

    /// Servers before 0.2 kept these in the data directory itself.
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

    /// A directory that is open to others already is somebody's choice, and is left as it is.
    fn let_group_pass(&self, gid: u32) -> io::Result<()> {
        let mode = self.0.metadata()?.permissions().mode();
        if mode & 0o067 != 0 {
            return Ok(());
        }
        rustix::fs::chown(&self.0, None, Some(Gid::from_raw(gid)))?;
        std::fs::set_permissions(&self.0, Permissions::from_mode(0o710))
    }
}
