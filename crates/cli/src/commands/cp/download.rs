//! From a session to this machine. The other side is hostile: names, types and sizes are checked before they are used.

use super::{Listing, Progress, Remote, RemoteKind, kind, list, names, printable};
use crate::failure::Failure;
use crate::output::Raw;
use k8e_api::client::{Client, Streaming};
use k8e_api::v1::{self, read_file_response::Message};
use std::collections::HashSet;
use std::ffi::OsString;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Entries of one copied directory; the server lists no more.
const ENTRIES_MAX: usize = 100_000;

/// Sum of the sizes of their paths: the listing is kept in memory.
const LISTING_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Prefix of unfinished files.
const PARTIAL_PREFIX: &str = ".k8e-cp-";

/// An entry that is copied.
struct Entry {
    /// In the session.
    remote: Remote,
    /// Below the target.
    relative: PathBuf,
    is_dir: bool,
    mode: u32,
}

/// Writes a file to standard output.
pub(super) async fn stream(client: &mut Client, source: &Remote) -> Result<(), Failure> {
    let mut raw = Raw::new();
    let mut messages = read(client, source).await?;
    while let Some(message) = messages.message().await? {
        if let Some(Message::Data(data)) = message.message {
            raw.stdout(&data).await?;
        }
    }
    Ok(())
}

pub(super) async fn run(
    client: &mut Client,
    source: Remote,
    target: OsString,
    bytes_max: u64,
    progress: &mut Progress,
) -> Result<(), Failure> {
    let target = PathBuf::from(target);
    let kind = kind(client, &source).await?;
    let existing = target.metadata().ok();
    let is_dir = existing.as_ref().is_some_and(std::fs::Metadata::is_dir);
    // Under its own name in a directory that exists, except for SOURCE/.
    let target = match source.name() {
        Some(name) if is_dir => target.join(names::relative(b"", &[b"/", name].concat())?),
        Some(_) | None => target,
    };
    match kind {
        RemoteKind::File => {
            if is_dir && source.name().is_none() {
                let error = format!("{} is no directory", source.show());
                return Err(Failure::request(error, "invalid"));
            }
            let target = settled(&target)?;
            file(client, &source, &target, 0o666, bytes_max, progress).await
        }
        RemoteKind::Directory => tree(client, &source, &target, bytes_max, progress).await,
    }
}

/// Where a file is written: links are followed by hand, because the last step is a rename.
fn settled(target: &Path) -> Result<PathBuf, Failure> {
    match target.metadata() {
        Ok(found) if found.is_file() => target.canonicalize().map_err(|e| failed(target, &e)),
        Ok(_) => {
            let error = format!(
                "{} is no regular file: choose another target, or - for standard output",
                target.display()
            );
            Err(Failure::request(error, "invalid"))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(target.to_owned()),
        Err(e) => Err(failed(target, &e)),
    }
}

async fn tree(
    client: &mut Client,
    source: &Remote,
    target: &Path,
    bytes_max: u64,
    progress: &mut Progress,
) -> Result<(), Failure> {
    // All names are checked before anything is written.
    let entries = entries(client, source, bytes_max, progress).await?;
    if !target.is_dir() {
        std::fs::create_dir(target).map_err(|e| failed(target, &e))?;
    }
    progress.copied.directories += 1;
    let mut made = HashSet::new();
    for entry in entries {
        if entry.is_dir {
            make_dirs(target, &entry.relative, &mut made, progress)?;
            continue;
        }
        if let Some(parent) = entry.relative.parent() {
            make_dirs(target, parent, &mut made, progress)?;
        }
        let to = target.join(&entry.relative);
        // A rename replaces links and refuses directories.
        file(client, &entry.remote, &to, entry.mode, bytes_max, progress).await?;
    }
    Ok(())
}

/// The files and directories of a listing.
async fn entries(
    client: &mut Client,
    source: &Remote,
    bytes_max: u64,
    progress: &mut Progress,
) -> Result<Vec<Entry>, Failure> {
    let (mut next, mut pages): (_, Listing) = list(client, source, true).await?;
    let (mut entries, mut root, mut path_bytes, mut total) = (Vec::new(), None, 0, 0u64);
    while let Some(page) = next {
        if page.truncated || entries.len() + page.files.len() > ENTRIES_MAX {
            return Err(too_many(source));
        }
        for file in page.files {
            path_bytes += file.path.len();
            if path_bytes > LISTING_BYTES_MAX {
                return Err(too_many(source));
            }
            let root = root.get_or_insert_with(|| names::root(&file.path).to_vec());
            let relative = names::relative(root, &file.path)?;
            let is_dir = match file.r#type.as_str() {
                "directory" => true,
                "file" => false,
                _ => {
                    progress.copied.skipped += 1;
                    continue;
                }
            };
            if !is_dir {
                total = total.saturating_add(file.size);
            }
            entries.push(Entry {
                remote: Remote {
                    session_id: source.session_id.clone(),
                    path: file.path.into(),
                },
                relative,
                is_dir,
                mode: file.mode & 0o777,
            });
        }
        next = pages.message().await?;
    }
    if total > bytes_max {
        return Err(too_large(source, bytes_max));
    }
    Ok(entries)
}

/// Makes directories below `target`. An existing link is refused: what is in the sandbox must not choose where it leads.
fn make_dirs(
    target: &Path,
    relative: &Path,
    made: &mut HashSet<PathBuf>,
    progress: &mut Progress,
) -> Result<(), Failure> {
    if relative.as_os_str().is_empty() || made.contains(relative) {
        return Ok(());
    }
    let mut below = PathBuf::new();
    for name in relative {
        below.push(name);
        if made.contains(&below) {
            continue;
        }
        let path = target.join(&below);
        match path.symlink_metadata() {
            Ok(found) if found.is_dir() => {}
            Ok(_) => {
                let error = format!(
                    "{} exists and is no directory: remove it, or choose another target",
                    path.display()
                );
                return Err(Failure::request(error, "already_exists"));
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                std::fs::create_dir(&path).map_err(|e| failed(&path, &e))?;
            }
            Err(e) => return Err(failed(&path, &e)),
        }
        progress.copied.directories += 1;
        made.insert(below.clone());
    }
    Ok(())
}

/// Copies one file: written beside its target and renamed when it is complete. `mode` is subject to the umask.
async fn file(
    client: &mut Client,
    source: &Remote,
    target: &Path,
    mode: u32,
    bytes_max: u64,
    progress: &mut Progress,
) -> Result<(), Failure> {
    let mut messages = read(client, source).await?;
    let first = messages.message().await?;
    let mode = match &first {
        Some(v1::ReadFileResponse {
            message: Some(Message::Info(info)),
        }) => info.mode & 0o777,
        _ => mode,
    };
    let dir = match target.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    let mut partial = partial(dir, mode).map_err(|e| failed(target, &e))?;
    let name = target.display().to_string();
    let mut next = first;
    while let Some(message) = next {
        if let Some(Message::Data(data)) = message.message {
            let left = bytes_max.saturating_sub(progress.copied.bytes);
            if data.len() as u64 > left {
                return Err(too_large(source, bytes_max));
            }
            partial.write_all(&data).map_err(|e| failed(target, &e))?;
            progress.bytes(data.len(), &name);
        }
        next = messages.message().await?;
    }
    partial
        .persist(target)
        .map_err(|e| failed(target, &e.error))?;
    progress.copied.files += 1;
    Ok(())
}

/// A new file beside the target, removed again unless it is persisted.
fn partial(dir: &Path, mode: u32) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(PARTIAL_PREFIX);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        builder.permissions(std::fs::Permissions::from_mode(mode));
    }
    #[cfg(not(unix))]
    let _ = mode;
    builder.tempfile_in(dir)
}

async fn read(
    client: &mut Client,
    source: &Remote,
) -> Result<Streaming<v1::ReadFileResponse>, Failure> {
    let request = v1::ReadFileRequest {
        session_id: source.session_id.clone(),
        path: source.path.clone().into(),
        offset: 0,
        length: 0,
    };
    Ok(client.read_file(request).await?.into_inner())
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    let shown = printable(&path.display().to_string());
    Failure::request(format!("cannot write {shown}: {error}"), "local")
}

fn too_many(source: &Remote) -> Failure {
    let error = format!(
        "{} has more than {ENTRIES_MAX} entries: copy parts of it, or an archive that `tar` makes in the sandbox",
        source.show()
    );
    Failure::request(error, "resource_exhausted")
}

fn too_large(source: &Remote, bytes_max: u64) -> Failure {
    let error = format!(
        "{} is larger than {bytes_max} bytes: raise --max-size, or copy a part of it",
        source.show()
    );
    Failure::request(error, "resource_exhausted")
}
