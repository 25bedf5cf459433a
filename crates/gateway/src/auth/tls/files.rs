//! Certificate files: written atomically; keys are readable by root alone.

use crate::Error;
use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

/// Certificates and keys are a few hundred bytes.
const FILE_BYTES_MAX: u64 = 64 * 1024;

pub(super) fn make_dir(dir: &Path) -> Result<(), Error> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(failed("create", dir))
}

/// None when it does not exist.
pub(super) fn read(path: &Path) -> Result<Option<String>, Error> {
    let read = || -> io::Result<String> {
        let mut text = String::new();
        std::fs::File::open(path)?
            .take(FILE_BYTES_MAX)
            .read_to_string(&mut text)?;
        Ok(text)
    };
    match read() {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        // Not text: what reads it says so better.
        Err(e) if e.kind() == io::ErrorKind::InvalidData => Ok(Some(String::new())),
        Err(e) => Err(failed("read", path)(e)),
    }
}

pub(super) fn write(path: &Path, text: &str) -> Result<(), Error> {
    replace(path, text, 0o644).map_err(failed("write", path))
}

pub(super) fn write_key(path: &Path, text: &str) -> Result<(), Error> {
    replace(path, text, 0o600).map_err(failed("write", path))
}

/// Creates or replaces a symbolic link; anything else of that name stays.
pub(super) fn link(target: &Path, path: &Path) -> Result<(), Error> {
    let make = || -> io::Result<()> {
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.is_symlink() => return Ok(()),
            Ok(_) if std::fs::read_link(path)? == target => return Ok(()),
            Ok(_) => std::fs::remove_file(path)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        std::os::unix::fs::symlink(target, path)
    };
    make().map_err(failed("link", path))
}

fn replace(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    let new = path.with_extension("new");
    match std::fs::remove_file(&new) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(new, path)
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::CertificateFile {
        operation,
        path,
        source,
    }
}
