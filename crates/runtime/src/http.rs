//! What both HTTP doors share: bodies in and out, with their bounds.

use crate::agent::{Failure, Reading};
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

/// What is read of a body that nobody wants, so that a client that is still sending gets to read why.
const DISCARD_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// For how long.
const DISCARD_WITHIN: Duration = Duration::from_secs(2);

/// Entries of one listing: more than anybody reads, less than hurts.
pub(crate) const ENTRIES_MAX: u64 = 100_000;

/// Of a response.
pub(crate) type Body = UnsyncBoxBody<Bytes, Failure>;

/// A request's body, which may be hostile.
pub(crate) struct Upload {
    body: Incoming,
    idle: Duration,
    left: u64,
    max: u64,
}

/// Why a body was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadError {
    /// Too large.
    #[error("the body is larger than {0} bytes, which is the most that is taken")]
    TooLarge(u64),
    /// Nothing came for too long.
    #[error("nothing of the body came for {} seconds", .0.as_secs())]
    Idle(Duration),
    /// The connection broke, or the framing is wrong.
    #[error("the body ended early")]
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

    /// The next bytes, never empty; none at the end.
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

    /// All of it.
    pub(crate) async fn whole(&mut self) -> Result<Vec<u8>, UploadError> {
        let mut whole = Vec::new();
        while let Some(data) = self.next().await? {
            whole.extend_from_slice(&data);
        }
        Ok(whole)
    }

    /// Reads what is left, within bounds, and forgets it.
    pub(crate) async fn discard(&mut self) {
        self.left = DISCARD_BYTES_MAX;
        let _ = timeout(DISCARD_WITHIN, async {
            while let Ok(Some(_)) = self.next().await {}
        })
        .await;
    }
}

/// An answer in JSON.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    let text = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(Full::from(text).map_err(|e| match e {}).boxed_unsync());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// An answer without a body.
pub(crate) fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Empty::new().map_err(|e| match e {}).boxed_unsync());
    *response.status_mut() = status;
    response
}

/// An answer with so many bytes of a file; as many as there are where its size is not known.
pub(crate) fn content(reading: Reading, length: Option<u64>) -> Response<Body> {
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

/// `file` or `directory`, which is all that clients know.
pub(crate) fn type_name(info: &FileInfo) -> &'static str {
    match info.r#type() {
        FileType::Directory => "directory",
        FileType::File | FileType::Symlink | FileType::Other | FileType::Unspecified => "file",
    }
}

/// A directory's entries, what links lead to in the place of the links. One that leads nowhere, or
/// out of the root, is left out.
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

/// How long this has been up.
pub(crate) fn uptime_seconds(since: Instant) -> u64 {
    since.elapsed().as_secs()
}
