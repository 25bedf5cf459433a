//! Shared by both HTTP APIs: bounded request bodies, JSON and file responses, directory listings.

use crate::agent::{Failure, FileReader};
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode};
use k8e_wire::proto::{ErrorCode, FileInfo, FileType};
use serde::Serialize;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Bytes that are drained from the body of a refused request. A client that is still sending can then read the
/// response.
const DISCARD_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Time limit for that.
const DISCARD_WITHIN: Duration = Duration::from_secs(2);

/// Entries of one directory listing, about 10 MiB of JSON; further ones are left out, and the response says so.
pub(crate) const ENTRIES_MAX: u64 = 100_000;

/// Body of a response.
pub(crate) type Body = UnsyncBoxBody<Bytes, Failure>;

/// Body of a request, with a size limit and an idle timeout.
pub(crate) struct Upload {
    body: Incoming,
    idle: Duration,
    left: u64,
    max: u64,
}

/// Why a request body could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadError {
    /// The body exceeds the size limit, in bytes.
    #[error("the request body is larger than the limit of {0} bytes")]
    TooLarge(u64),
    /// No bytes arrived for the idle timeout.
    #[error("no bytes of the request body arrived for {} seconds", .0.as_secs())]
    Idle(Duration),
    /// The connection broke, or the framing is invalid.
    #[error("the request body ended early")]
    Broken,
}

// === impl Upload ===

impl Upload {
    pub(crate) fn new(request: Request<Incoming>, max: u64, idle: Duration) -> Self {
        let body = request.into_body();
        let left = max;
        Self {
            body,
            idle,
            left,
            max,
        }
    }

    /// The next chunk, never empty; `None` at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, UploadError> {
        loop {
            let frame = timeout(self.idle, self.body.frame())
                .await
                .map_err(|_| UploadError::Idle(self.idle))?;
            let Some(frame) = frame else { return Ok(None) };
            let Ok(data) = frame.map_err(|_| UploadError::Broken)?.into_data() else {
                continue;
            };
            self.left = self
                .left
                .checked_sub(data.len() as u64)
                .ok_or(UploadError::TooLarge(self.max))?;
            if !data.is_empty() {
                return Ok(Some(data));
            }
        }
    }

    /// Reads the whole body into memory.
    pub(crate) async fn whole(&mut self) -> Result<Vec<u8>, UploadError> {
        let mut whole = Vec::new();
        while let Some(data) = self.next().await? {
            whole.extend_from_slice(&data);
        }
        Ok(whole)
    }

    /// Reads and drops the rest, up to [`DISCARD_BYTES_MAX`] and [`DISCARD_WITHIN`].
    pub(crate) async fn discard(&mut self) {
        self.left = DISCARD_BYTES_MAX;
        let _ = timeout(DISCARD_WITHIN, async {
            while let Ok(Some(_)) = self.next().await {}
        })
        .await;
    }
}

/// A JSON response.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    let text = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(Full::from(text).map_err(|e| match e {}).boxed_unsync());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A response without a body.
pub(crate) fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Empty::new().map_err(|e| match e {}).boxed_unsync());
    *response.status_mut() = status;
    response
}

/// A response that streams a file. Without a `length`, for files of unknown size, it is chunked.
pub(crate) fn content(reading: FileReader, length: Option<u64>) -> Response<Body> {
    let chunks = futures::stream::try_unfold(reading, |mut reading| async move {
        let data = reading.next().await?;
        Ok(data.map(|data| (Frame::data(data), reading)))
    });
    let mut response = Response::new(StreamBody::new(chunks).boxed_unsync());
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    if let Some(length) = length {
        headers.insert(CONTENT_LENGTH, length.into());
    }
    response
}

/// `file` or `directory`; the APIs have no other types.
pub(crate) fn type_name(info: &FileInfo) -> &'static str {
    match info.r#type() {
        FileType::Directory => "directory",
        FileType::File | FileType::Symlink | FileType::Other | FileType::Unspecified => "file",
    }
}

/// The entries of a directory, with symbolic links followed. Links that are dangling or lead out of the root are left
/// out.
pub(crate) async fn entries(
    root: &crate::agent::Root,
    path: &[u8],
) -> Result<(Vec<(String, FileInfo)>, bool), Failure> {
    let (listed, whole) = root.list(path, ENTRIES_MAX).await?;
    let mut entries = Vec::with_capacity(listed.len());
    for (name, info) in listed {
        if info.r#type() != FileType::Symlink {
            entries.push((name, info));
            continue;
        }
        let below = match path {
            b"" => name.clone().into_bytes(),
            _ => [path, name.as_bytes()].join(&b'/'),
        };
        match root.stat(&below).await {
            Ok(target) => entries.push((name, target)),
            Err(failure) if failure.code == ErrorCode::Io => return Err(failure),
            Err(_) => {}
        }
    }
    Ok((entries, whole))
}

/// Whole seconds since the runtime started.
pub(crate) fn uptime_seconds(since: Instant) -> u64 {
    since.elapsed().as_secs()
}
