//! Privilege drop of the server: the unprivileged uid and gid that it changes to once everything that needs root is done or
//! delegated to the launcher.
//!
//! It needs no entry in `/etc/passwd`: the uid is derived from the path of the data directory, in a range that distributions
//! leave unassigned, so that two servers on one machine have different uids. Once the store of a data directory has an owner,
//! that uid is kept, also when the directory is moved.

use super::args;
use super::data_dir::DataDir;
use super::error::Error;
use k8e_confine::Confinement;
use rustix::fs::{Access, AtFlags, CWD, Gid, Uid};
use std::fs::{self, DirBuilder};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Range of server uids; the uid ranges of sandboxes begin at 0x7000_0000.
const FIRST: u32 = 0x6f00_0000;
const COUNT: u32 = 0x0100_0000;

/// Files that the server may read besides its own (Landlock): users and groups, addresses, memory and CPU of the machine, and
/// its own `/proc` entry. `/etc` as a directory, because files there are replaced.
const READ_ONLY: [&str; 8] = [
    "/etc",
    "/proc/self",
    "/proc/stat",
    "/proc/meminfo",
    "/proc/cpuinfo",
    "/proc/sys/kernel/random",
    "/dev/null",
    "/dev/urandom",
];

/// Bound for the recursion of `chown`: deeper than any directory of the store or of TLS.
const DEPTH_MAX: usize = 8;

/// Uid and gid of the unprivileged server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServerUser {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

// === impl ServerUser ===

impl ServerUser {
    /// The uid for this data directory.
    pub(super) fn of(data_dir: &DataDir) -> Self {
        let owner = fs::symlink_metadata(data_dir.store()).map(|meta| meta.uid());
        let uid = match owner {
            Ok(uid) if Self::is_one(uid) => uid,
            _ => {
                let mut hasher = DefaultHasher::new();
                data_dir.path().hash(&mut hasher);
                let number = u32::try_from(hasher.finish() % u64::from(COUNT));
                FIRST + number.unwrap_or_default()
            }
        };
        Self { uid, gid: uid }
    }

    /// Whether this uid is in the range of server uids.
    pub(super) fn is_one(uid: u32) -> bool {
        (FIRST..FIRST + COUNT).contains(&uid)
    }

    /// Creates a directory if missing and makes this user the owner of it and of all in it. One that this user already owns
    /// is not entered: a compromised server may have put anything there.
    pub(super) fn own(&self, dir: &Path) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            done => done?,
        }
        let meta = fs::symlink_metadata(dir)?;
        if !meta.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        if meta.uid() == self.uid {
            return Ok(());
        }
        self.give(dir, DEPTH_MAX)
    }

    /// Recursive `chown`. The directory itself comes last, so that an interrupted one is repeated.
    fn give(&self, path: &Path, depth: usize) -> io::Result<()> {
        if depth > 0 && fs::symlink_metadata(path)?.is_dir() {
            for entry in fs::read_dir(path)? {
                self.give(&entry?.path(), depth - 1)?;
            }
        }
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        Ok(rustix::fs::chownat(CWD, path, Some(uid), Some(gid), flags)?)
    }

    /// Drops root irrevocably. The process must have one thread.
    pub(super) fn become_it(&self, data_dir: &DataDir) -> Result<(), Error> {
        let culprit = self.cannot_pass(data_dir.path());
        let own = data_dir.servers();
        let confinement = Confinement {
            uid: self.uid,
            gid: self.gid,
            groups: args::socket_group().into_iter().collect(),
            read_write: own.to_vec(),
            read_only: READ_ONLY.map(PathBuf::from).into(),
        };
        let weaker = k8e_confine::confine(&confinement).map_err(Error::Confine)?;
        for what in weaker {
            tracing::warn!("{what}");
        }
        for dir in own {
            if let Err(source) = rustix::fs::access(&dir, Access::READ_OK | Access::WRITE_OK) {
                let (path, uid) = (culprit.unwrap_or(dir), self.uid);
                let source = source.into();
                return Err(Error::CannotPass { path, uid, source });
            }
        }
        Ok(())
    }

    /// The first parent directory whose mode does not let this user pass through.
    fn cannot_pass(&self, data_dir: &Path) -> Option<PathBuf> {
        let mut above: Vec<&Path> = data_dir.ancestors().skip(1).collect();
        above.reverse();
        let closed = above.into_iter().find(|dir| {
            let mode = fs::metadata(dir).map(|meta| meta.permissions().mode());
            mode.is_ok_and(|mode| mode & 0o001 == 0)
        });
        closed.map(Path::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_directory_has_a_user_and_keeps_it_as_root() {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = DataDir::prepare(&dir.path().join("one")).unwrap();
        let user = ServerUser::of(&data_dir);
        assert_eq!(user, ServerUser::of(&data_dir));
        assert!((FIRST..FIRST + COUNT).contains(&user.uid));
        let other = DataDir::prepare(&dir.path().join("two")).unwrap();
        assert_ne!(user, ServerUser::of(&other));
        assert!(
            rustix::process::geteuid().is_root(),
            "this test changes owners: run it as root"
        );
        data_dir.give_to(&user).unwrap();
        let moved = dir.path().join("moved");
        fs::rename(data_dir.path(), &moved).unwrap();
        assert_eq!(user, ServerUser::of(&DataDir::prepare(&moved).unwrap()));
    }

    #[test]
    fn the_store_of_an_older_server_moves_and_links_are_not_followed_as_root() {
        assert!(
            rustix::process::geteuid().is_root(),
            "this test changes owners: run it as root"
        );
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        fs::write(&outside, "root's").unwrap();
        let data_dir = DataDir::prepare(&dir.path().join("data")).unwrap();
        let path = data_dir.path();
        fs::write(path.join("k8e.db"), "rows").unwrap();
        fs::create_dir_all(path.join("transcripts/a")).unwrap();
        std::os::unix::fs::symlink(&outside, path.join("transcripts/a/link")).unwrap();
        let user = ServerUser::of(&data_dir);
        data_dir.give_to(&user).unwrap();
        let owner = |path: &Path| fs::symlink_metadata(path).unwrap().uid();
        let store = data_dir.store();
        assert_eq!(fs::read_to_string(store.join("k8e.db")).unwrap(), "rows");
        for own in [
            "k8e.db",
            "transcripts",
            "transcripts/a",
            "transcripts/a/link",
            "",
        ] {
            assert_eq!(owner(&store.join(own)), user.uid, "{own}");
        }
        assert_eq!((owner(&outside), owner(path)), (0, 0));
        assert_eq!(fs::metadata(path).unwrap().mode() & 0o777, 0o710);
    }
}
