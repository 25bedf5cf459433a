//! From this machine to a session.

use super::{Local, Progress, Remote, RemoteKind, existing};
use crate::failure::Failure;
use k8e_api::CHUNK_BYTES;
use k8e_api::client::Client;
use k8e_api::v1::{self, write_file_request::Message};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Queue of messages: enough to keep the connection busy.
const QUEUE_MAX: usize = 4;

/// Permissions of new directories where the local ones have none.
#[cfg(not(unix))]
const DIR_MODE: u32 = 0o755;

pub(super) async fn run(
    client: &mut Client,
    source: Local,
    target: Remote,
    progress: &mut Progress,
) -> Result<(), Failure> {
    let source = match source {
        Local::Path(path) => PathBuf::from(path),
        Local::Stream => {
            if existing(client, &target).await? == Some(RemoteKind::Directory) {
                let error = format!(
                    "{} is a directory: name the file that standard input is written to",
                    target.show()
                );
                return Err(Failure::request(error, "invalid"));
            }
            return send(client, Box::new(io::stdin()), target, 0, "-", progress).await;
        }
    };
    // The named source may be a link; what is below it may not.
    let metadata = source.metadata().map_err(|e| failed(&source, &e))?;
    let is_into = ends_with_dot(&source);
    let target = match existing(client, &target).await? {
        Some(RemoteKind::Directory) if !is_into => {
            let name = source.file_name().map(ToOwned::to_owned);
            let name = match name {
                Some(name) => name,
                // `..` has a name too.
                None => source
                    .canonicalize()
                    .map_err(|e| failed(&source, &e))?
                    .file_name()
                    .unwrap_or_default()
                    .to_owned(),
            };
            target.join(name.as_encoded_bytes())
        }
        Some(RemoteKind::Directory | RemoteKind::File) | None => target,
    };
    if metadata.is_dir() {
        return tree(client, source, &metadata, target, progress).await;
    }
    let file = File::open(&source).map_err(|e| failed(&source, &e))?;
    let name = source.display().to_string();
    send(
        client,
        Box::new(file),
        target,
        mode(&metadata),
        &name,
        progress,
    )
    .await
}

/// Copies a directory: parents before children.
async fn tree(
    client: &mut Client,
    source: PathBuf,
    metadata: &Metadata,
    target: Remote,
    progress: &mut Progress,
) -> Result<(), Failure> {
    make_dir(client, &target, dir_mode(metadata), progress).await?;
    let mut waiting = vec![(source, target)];
    while let Some((source, target)) = waiting.pop() {
        let entries = std::fs::read_dir(&source).map_err(|e| failed(&source, &e))?;
        for entry in entries {
            let entry = entry.map_err(|e| failed(&source, &e))?;
            let path = entry.path();
            let metadata = path.symlink_metadata().map_err(|e| failed(&path, &e))?;
            let target = target.join(entry.file_name().as_encoded_bytes());
            if metadata.is_dir() {
                make_dir(client, &target, dir_mode(&metadata), progress).await?;
                waiting.push((path, target));
            } else if metadata.is_file() {
                let file = open_no_follow(&path).map_err(|e| failed(&path, &e))?;
                let name = path.display().to_string();
                send(
                    client,
                    Box::new(file),
                    target,
                    mode(&metadata),
                    &name,
                    progress,
                )
                .await?;
            } else {
                progress.copied.skipped += 1;
            }
        }
    }
    Ok(())
}

async fn make_dir(
    client: &mut Client,
    target: &Remote,
    mode: u32,
    progress: &mut Progress,
) -> Result<(), Failure> {
    let request = v1::MakeDirRequest {
        session_id: target.session_id.clone(),
        path: target.path.clone().into(),
        parents: true,
        mode,
    };
    client.make_dir(request).await?;
    progress.copied.directories += 1;
    Ok(())
}

/// Sends one file. The stream ends, and so the file is committed, only after all of it was read.
async fn send(
    client: &mut Client,
    reader: Box<dyn Read + Send>,
    target: Remote,
    mode: u32,
    name: &str,
    progress: &mut Progress,
) -> Result<(), Failure> {
    let (sender, receiver) = mpsc::channel(QUEUE_MAX);
    let start = v1::WriteFileStart {
        session_id: target.session_id,
        path: target.path.into(),
        append: false,
        mode,
    };
    let first = v1::WriteFileRequest {
        message: Some(Message::Start(start)),
    };
    sender.try_send(first).expect("a new channel has room");
    let (counter, mut counts) = mpsc::channel(QUEUE_MAX);
    let feeding = sender.clone();
    let mut reading = tokio::task::spawn_blocking(move || feed(reader, &feeding, &counter));
    // Held until all was read: dropping the last sender commits the file.
    let mut held = Some(sender);
    let call = client.write_file(ReceiverStream::new(receiver));
    tokio::pin!(call);
    loop {
        tokio::select! {
            answer = &mut call => {
                answer?;
                progress.copied.files += 1;
                return Ok(());
            }
            Some(count) = counts.recv() => progress.bytes(count, name),
            read = &mut reading, if held.is_some() => {
                // Reading failed: the call is cancelled, and an old file is kept.
                let read = read.map_err(io::Error::other).and_then(|read| read);
                read.map_err(|e| failed(Path::new(name), &e))?;
                held = None;
            }
        }
    }
}

/// Reads to the end; runs on a thread of its own. Ends early when the server answered early: its answer says why.
fn feed(
    mut reader: Box<dyn Read + Send>,
    sender: &mpsc::Sender<v1::WriteFileRequest>,
    counter: &mpsc::Sender<usize>,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let length = match reader.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(length) => length,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        let message = v1::WriteFileRequest {
            message: Some(Message::Data(buffer[..length].to_vec().into())),
        };
        if sender.blocking_send(message).is_err() || counter.blocking_send(length).is_err() {
            return Ok(());
        }
    }
}

/// Whether what is in the directory is meant, and not the directory.
fn ends_with_dot(path: &Path) -> bool {
    let bytes = path.as_os_str().as_encoded_bytes();
    bytes == b"." || bytes.ends_with(b"/.") || (cfg!(windows) && bytes.ends_with(b"\\."))
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::request(format!("cannot copy {}: {error}", path.display()), "local")
}

/// Opens a file that was no symbolic link a moment ago, and fails if it has become one.
fn open_no_follow(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        options.custom_flags(flags.bits().cast_signed());
    }
    options.open(path)
}

#[cfg(unix)]
fn mode(metadata: &Metadata) -> u32 {
    use std::os::unix::fs::PermissionsExt as _;
    metadata.permissions().mode() & 0o777
}

#[cfg(unix)]
fn dir_mode(metadata: &Metadata) -> u32 {
    mode(metadata)
}

/// The server's default.
#[cfg(not(unix))]
fn mode(_metadata: &Metadata) -> u32 {
    0
}

#[cfg(not(unix))]
fn dir_mode(_metadata: &Metadata) -> u32 {
    DIR_MODE
}
