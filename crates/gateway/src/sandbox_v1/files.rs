//! Files in one message, as text.

use super::MESSAGE_BYTES_MAX;
use crate::k8e_v1::{engine_status, model_status};
use k8e_api::convert::sandbox_v1;
use k8e_api::sandbox_v1 as pb;
use k8e_api::status::to_status;
use k8e_engine::{FileInfo, FileKind, FileRange, ListOptions, Sessions, WriteOptions};
use k8e_model::{Code, GuestPath, Principal, SessionId, WORKSPACE};
use tonic::Status;

/// A file must fit into a message, with what the message needs besides.
const READ_BYTES_MAX: usize = MESSAGE_BYTES_MAX - 1024;

/// Bytes of a listing: it has to fit into a message too, and the API cannot say that it was truncated.
const LIST_BYTES_MAX: usize = 32 * 1024 * 1024;

/// Bytes of an entry besides its path.
const ENTRY_BYTES: usize = 40;

const NANOS_PER_SECOND: i64 = 1_000_000_000;

/// The Go server answers `ok: false` on failure, and a client that does not check it goes on. Here that is an error with
/// its cause.
pub(super) async fn write(
    sessions: &Sessions,
    who: &Principal,
    request: pb::WriteFileRequest,
) -> Result<pb::WriteFileResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    let path = GuestPath::parse_script(request.path.as_bytes()).map_err(model_status)?;
    let (append, mode) = sandbox_v1::write_mode(&request.mode);
    let options = WriteOptions {
        append,
        mode,
        owner: None,
    };
    let mut writer = sessions
        .write_file(who, &id, &path, options)
        .await
        .map_err(engine_status)?;
    let written = writer.write(request.content.into()).await;
    written.map_err(engine_status)?;
    writer.finish().await.map_err(engine_status)?;
    Ok(pb::WriteFileResponse { ok: true })
}

/// The Go server answers with nothing when there is no such file, which looks like an empty one; here that is `NOT_FOUND`.
/// What is not UTF-8 cannot be in a text field: clients would write it back broken, so it is refused.
pub(super) async fn read(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::ReadFileRequest,
) -> Result<pb::ReadFileResponse, Status> {
    let (id, path) = place(&request.session_id, &request.path)?;
    let mut reader = sessions
        .read_file(who, &id, &path, FileRange::default())
        .await
        .map_err(engine_status)?;
    let mut content = Vec::new();
    while let Some(bytes) = reader.next().await.map_err(engine_status)? {
        if content.len() + bytes.len() > READ_BYTES_MAX {
            return Err(refused(
                &request.path,
                &format!("has more than {READ_BYTES_MAX} bytes"),
            ));
        }
        content.extend_from_slice(&bytes);
    }
    let content = String::from_utf8(content);
    let content = content.map_err(|_| refused(&request.path, "is not UTF-8 text"))?;
    Ok(pb::ReadFileResponse { content })
}

pub(super) async fn list(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::ListFilesRequest,
) -> Result<pb::ListFilesResponse, Status> {
    let (id, path) = place(&request.session_id, WORKSPACE)?;
    let options = ListOptions {
        recursive: true,
        since_unix_s: request.since.max(0),
        depth: 0,
    };
    let mut lister = sessions
        .list_files(who, &id, &path, options)
        .await
        .map_err(engine_status)?;
    let (mut files, mut bytes) = (Vec::new(), 0);
    while let Some(page) = lister.next().await.map_err(engine_status)? {
        let page = page
            .into_iter()
            .filter(|file| file.kind != FileKind::Directory);
        for file in page.map(entry) {
            bytes += file.path.len() + ENTRY_BYTES;
            files.push(file);
        }
        if bytes > LIST_BYTES_MAX {
            return Err(too_many(files.len()));
        }
    }
    if lister.truncated() {
        return Err(too_many(files.len()));
    }
    Ok(pb::ListFilesResponse { files })
}

/// A name that is not UTF-8 is converted lossily.
fn entry(info: FileInfo) -> pb::FileEntry {
    pb::FileEntry {
        path: String::from_utf8_lossy(&info.path).into_owned(),
        modified: info.mtime_unix_ns.div_euclid(NANOS_PER_SECOND),
        r#type: info.kind.as_str().to_owned(),
        size: i64::try_from(info.size).unwrap_or(i64::MAX),
    }
}

fn refused(path: &str, why: &str) -> Status {
    let message = format!(
        "{path} {why}, which this call cannot carry: read it with k8e.v1 ReadFile (`k8e sandbox read --raw`)"
    );
    to_status(Code::Precondition, &message)
}

fn too_many(files: usize) -> Status {
    let message = format!(
        "more than {files} files, which this call cannot carry: list with k8e.v1 ListFiles (`k8e sandbox list`), or use `since`"
    );
    to_status(Code::Precondition, &message)
}

fn place(session_id: &str, path: &str) -> Result<(SessionId, GuestPath), Status> {
    let id = sandbox_v1::session_id(session_id).map_err(model_status)?;
    let path = GuestPath::parse(path.as_bytes()).map_err(model_status)?;
    Ok((id, path))
}
