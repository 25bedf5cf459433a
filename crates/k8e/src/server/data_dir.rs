//! The data directory: there, writable, and nobody else's business.

use super::args;
use super::error::Error;
use rustix::fs::Gid;
use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// A directory that we can write.
pub(super) struct DataDir(PathBuf);

// === impl DataDir ===

impl DataDir {
    /// Makes it when it is missing. Members of the socket's group may pass through it, no more.
    pub(super) fn prepare(path: &Path) -> Result<Self, Error> {
        let dir = Self(path.to_owned());
        let create = || -> io::Result<PathBuf> {
            DirBuilder::new().recursive(true).mode(0o700).create(path)?;
            // Absolute from here on: the launcher has another working directory.
            path.canonicalize()
        };
        let dir = Self(create().map_err(|source| dir.failed("make", source))?);
        dir.let_group_pass()
            .map_err(|source| dir.failed("set the permissions of", source))?;
        Ok(dir)
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
    fn let_group_pass(&self) -> io::Result<()> {
        let mode = self.0.metadata()?.permissions().mode();
        let Some(gid) = args::socket_group() else {
            return Ok(());
        };
        if mode & 0o077 != 0 {
            return Ok(());
        }
        rustix::fs::chown(&self.0, None, Some(Gid::from_raw(gid)))?;
        std::fs::set_permissions(&self.0, Permissions::from_mode(0o710))
    }
}
