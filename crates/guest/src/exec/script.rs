//! Code for an interpreter, in a private temporary file that is removed at the end of the call.

use crate::error::{Error, show};
use crate::sys;
use crate::users::User;
use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, Uid};
use std::os::fd::OwnedFd;

/// Fallback directory, when the working directory is not writable.
pub(crate) const FALLBACK_DIR: &[u8] = b"/tmp";

/// Bytes of the longest extension; real ones have three letters.
const EXTENSION_BYTES_MAX: usize = 16;

/// A script's file; dropping it removes it.
pub(crate) struct ScriptFile {
    dir: OwnedFd,
    name: String,
    path: Vec<u8>,
}

// === impl ScriptFile ===

impl ScriptFile {
    /// Writes the code into `dir`, or where that cannot be written, into `/tmp`.
    pub(crate) async fn write(
        dir: &[u8],
        extension: &str,
        code: &[u8],
        user: &User,
    ) -> Result<Self, Error> {
        if extension.len() > EXTENSION_BYTES_MAX
            || !extension.bytes().all(|byte| byte.is_ascii_alphanumeric())
        {
            return Err(Error::Invalid(format!(
                "script extension {extension:?}: use letters and digits"
            )));
        }
        match Self::write_in(dir, extension, code, user).await {
            Ok(file) => Ok(file),
            Err(error) => Self::write_in(FALLBACK_DIR, extension, code, user)
                .await
                .map_err(|_| error),
        }
    }

    /// Its absolute path.
    pub(crate) fn path(&self) -> &[u8] {
        &self.path
    }

    async fn write_in(
        dir_path: &[u8],
        extension: &str,
        code: &[u8],
        user: &User,
    ) -> Result<Self, Error> {
        let failed = |operation| Error::os::<std::io::Error>(operation, dir_path);
        let random = sys::random().map_err(failed("name a file in"))?;
        let dot = if extension.is_empty() { "" } else { "." };
        let name = format!(".k8e-run-{random:016x}{dot}{extension}");
        let dir_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(CWD, dir_path, dir_flags, Mode::empty())
            .map_err(Error::os("open", dir_path))?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&dir, name.as_str(), flags, Mode::from_raw_mode(0o600))
            .map_err(Error::os("write the script in", dir_path))?;
        let slash: &[u8] = if dir_path.ends_with(b"/") { b"" } else { b"/" };
        let path = [dir_path, slash, name.as_bytes()].concat();
        // From here on dropping removes the file.
        let script = Self { dir, name, path };
        if user.uid != 0 {
            rustix::fs::fchown(
                &file,
                Some(Uid::from_raw(user.uid)),
                Some(Gid::from_raw(user.gid)),
            )
            .map_err(Error::os("chown the script in", dir_path))?;
        }
        let mut file = std::fs::File::from(file);
        for chunk in code.chunks(k8e_wire::CHUNK_BYTES) {
            std::io::Write::write_all(&mut file, chunk).map_err(failed("write the script in"))?;
            if code.len() > k8e_wire::CHUNK_BYTES {
                tokio::task::yield_now().await;
            }
        }
        Ok(script)
    }
}

impl Drop for ScriptFile {
    fn drop(&mut self) {
        // The script may have removed itself.
        let _ = rustix::fs::unlinkat(&self.dir, self.name.as_str(), AtFlags::empty());
    }
}

impl std::fmt::Debug for ScriptFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ScriptFile({})", show(&self.path))
    }
}
