//! Files of a session's workspace.

use super::{Answers, engine_status, first_message, message_status, model_status};
use futures::StreamExt as _;
use k8e_api::convert;
use k8e_api::status::to_status;
use k8e_api::v1::{self, read_file_response, write_file_request::Message};
use k8e_engine::{
    FileInfo, FileLister, FileRange, FileReader, FileWriter, ListOptions, Sessions, WriteOptions,
};
use k8e_model::{Code, GuestPath, Principal, SessionId};
use std::time::Duration;
use tonic::{Status, Streaming};

/// Timeout between two messages of a write. A client that stalls for longer holds one of its session's calls,
/// and a half-written file in the sandbox, for nothing.
const DATA_WITHIN: Duration = Duration::from_secs(60);

pub(super) async fn read(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::ReadFileRequest,
) -> Result<Answers<v1::ReadFileResponse>, Status> {
    let (id, path) = place(&request.session_id, &request.path)?;
    let range = FileRange {
        offset: request.offset,
        length: request.length,
    };
    let reader = sessions
        .read_file(who, &id, &path, range)
        .await
        .map_err(engine_status)?;
    let info = read_file_response::Message::Info(file_info(reader.info.clone()));
    let first = futures::stream::iter([Ok(v1::ReadFileResponse {
        message: Some(info),
    })]);
    // The stream owns the reader: a client that disconnects ends the call in the guest.
    let rest = futures::stream::unfold(Some(reader), next_chunk);
    Ok(first.chain(rest).boxed())
}

async fn next_chunk(
    reader: Option<FileReader>,
) -> Option<(Result<v1::ReadFileResponse, Status>, Option<FileReader>)> {
    let mut reader = reader?;
    match reader.next().await.transpose()? {
        Ok(data) => {
            let message = Some(read_file_response::Message::Data(data));
            Some((Ok(v1::ReadFileResponse { message }), Some(reader)))
        }
        Err(error) => Some((Err(engine_status(error)), None)),
    }
}

/// The file is put in place only when the client ends its stream properly. Cancelling or disconnecting drops the writer,
/// and nothing is written.
pub(super) async fn write(
    sessions: &Sessions,
    who: &Principal,
    mut messages: Streaming<v1::WriteFileRequest>,
) -> Result<v1::WriteFileResponse, Status> {
    let first = first_message(&mut messages, "write").await?;
    let Some(Message::Start(start)) = first.and_then(|first| first.message) else {
        return Err(to_status(
            Code::Invalid,
            "the first message of a write must say where",
        ));
    };
    let (id, path) = place(&start.session_id, &start.path)?;
    let options = WriteOptions {
        append: start.append,
        mode: start.mode,
        owner: None,
    };
    let mut writer = sessions
        .write_file(who, &id, &path, options)
        .await
        .map_err(engine_status)?;
    while let Some(message) = next_message(&mut messages, &mut writer).await? {
        let Some(Message::Data(data)) = message.message else {
            return Err(to_status(
                Code::Invalid,
                "after its first message a write carries only data",
            ));
        };
        writer.write(data).await.map_err(engine_status)?;
    }
    let bytes = writer.finish().await.map_err(engine_status)?;
    Ok(v1::WriteFileResponse { bytes })
}

/// The next message of a write, while there is somewhere to write to.
async fn next_message(
    messages: &mut Streaming<v1::WriteFileRequest>,
    writer: &mut FileWriter,
) -> Result<Option<v1::WriteFileRequest>, Status> {
    tokio::select! {
        biased;
        gone = writer.session_gone() => Err(engine_status(gone)),
        message = tokio::time::timeout(DATA_WITHIN, messages.message()) => match message {
            Ok(message) => message.map_err(message_status),
            Err(_) => Err(to_status(
                Code::Timeout,
                &format!("nothing came for {DATA_WITHIN:?} in the middle of a write"),
            )),
        },
    }
}

pub(super) async fn list(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::ListFilesRequest,
) -> Result<Answers<v1::ListFilesResponse>, Status> {
    let (id, path) = place(&request.session_id, &request.path)?;
    let options = ListOptions {
        recursive: request.recursive,
        since_unix_s: request.since_unix_s,
        depth: 0,
    };
    let lister = sessions
        .list_files(who, &id, &path, options)
        .await
        .map_err(engine_status)?;
    Ok(futures::stream::unfold(Some(lister), next_page).boxed())
}

/// Whether the list was truncated is known at its end, and sent in a last page.
async fn next_page(
    lister: Option<FileLister>,
) -> Option<(Result<v1::ListFilesResponse, Status>, Option<FileLister>)> {
    let mut lister = lister?;
    match lister.next().await {
        Ok(Some(files)) => {
            let files = files.into_iter().map(file_info).collect();
            Some((
                Ok(v1::ListFilesResponse {
                    files,
                    truncated: false,
                }),
                Some(lister),
            ))
        }
        Ok(None) if lister.truncated() => Some((
            Ok(v1::ListFilesResponse {
                files: Vec::new(),
                truncated: true,
            }),
            None,
        )),
        Ok(None) => None,
        Err(error) => Some((Err(engine_status(error)), None)),
    }
}

pub(super) async fn stat(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::StatFileRequest,
) -> Result<v1::FileInfo, Status> {
    let (id, path) = place(&request.session_id, &request.path)?;
    sessions
        .stat(who, &id, &path)
        .await
        .map(file_info)
        .map_err(engine_status)
}

pub(super) async fn make_dir(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::MakeDirRequest,
) -> Result<v1::MakeDirResponse, Status> {
    let (id, path) = place(&request.session_id, &request.path)?;
    sessions
        .make_dir(who, &id, &path, request.parents, request.mode)
        .await
        .map_err(engine_status)?;
    Ok(v1::MakeDirResponse {})
}

pub(super) async fn move_file(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::MoveFileRequest,
) -> Result<v1::MoveFileResponse, Status> {
    let (id, from) = place(&request.session_id, &request.from)?;
    let to = GuestPath::parse(&request.to).map_err(model_status)?;
    sessions
        .move_file(who, &id, &from, &to)
        .await
        .map_err(engine_status)?;
    Ok(v1::MoveFileResponse {})
}

pub(super) async fn remove(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::RemoveFileRequest,
) -> Result<v1::RemoveFileResponse, Status> {
    let (id, path) = place(&request.session_id, &request.path)?;
    sessions
        .remove_file(who, &id, &path, request.recursive)
        .await
        .map_err(engine_status)?;
    Ok(v1::RemoveFileResponse {})
}

pub(super) fn place(session_id: &str, path: &[u8]) -> Result<(SessionId, GuestPath), Status> {
    let id = convert::session_id(session_id).map_err(model_status)?;
    let path = GuestPath::parse(path).map_err(model_status)?;
    Ok((id, path))
}

fn file_info(info: FileInfo) -> v1::FileInfo {
    v1::FileInfo {
        path: info.path,
        r#type: info.kind.as_str().to_owned(),
        size: info.size,
        mode: info.mode,
        uid: info.uid,
        gid: info.gid,
        mtime_unix_ns: info.mtime_unix_ns,
        symlink_target: info.symlink_target,
    }
}
