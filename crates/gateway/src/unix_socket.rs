//! The Unix socket's file: for root, and for the group if there is one.

use crate::Error;
use crate::auth::peer;
use k8e_net::proc_fd::SocketPath;
use rustix::fs::Gid;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;

/// Listens on `path`, which a dead server may have left behind.
///
/// The socket gets its name only after its permissions, so that nobody connects in between.
pub(crate) fn bind(path: &Path, group: &str) -> Result<UnixListener, Error> {
    let failed = |operation| {
        let path = path.to_owned();
        move |source| Error::Socket {
            operation,
            path,
            source,
        }
    };
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = SocketPath::new(Path::new(&new)).map_err(failed("open the directory of"))?;
    let _ = std::fs::remove_file(&new);
    let listener = UnixListener::bind(&new).map_err(failed("bind"))?;
    let (mode, gid) = match peer::group_id(group) {
        Some(gid) => (0o660, Some(Gid::from_raw(gid))),
        None => (0o600, None),
    };
    rustix::fs::chown(new.as_ref(), None, gid)
        .map_err(io::Error::from)
        .map_err(failed("chown"))?;
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(mode))
        .map_err(failed("chmod"))?;
    std::fs::rename(&new, path).map_err(failed("rename"))?;
    listener.set_nonblocking(true).map_err(failed("set up"))?;
    Ok(listener)
}
