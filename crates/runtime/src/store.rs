//! Writes a file from what a client sends, raw or in a form.

use crate::agent::{Failure, Root, Writing};
use crate::http::{Upload, UploadError};
use crate::multipart::{Multipart, MultipartError};
use bytes::Bytes;

/// Where the bytes come from.
pub(crate) enum Source {
    /// The body is the file.
    Raw(Upload),
    /// A part of the body is.
    Form(Multipart),
}

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// The guest refused.
    #[error(transparent)]
    Failure(#[from] Failure),
    /// The client did not send what it should.
    #[error(transparent)]
    Source(#[from] MultipartError),
}

// === impl Source ===

impl Source {
    async fn next(&mut self) -> Result<Option<Bytes>, MultipartError> {
        match self {
            Self::Raw(body) => Ok(body.next().await?),
            Self::Form(form) => form.data().await,
        }
    }

    /// Reads what is left, within bounds, so that a client that is still sending gets to read the answer.
    pub(crate) async fn discard(&mut self) {
        match self {
            Self::Raw(body) => body.discard().await,
            Self::Form(form) => form.body().discard().await,
        }
    }
}

/// Writes a file. When that fails, nothing of it is left by the time this returns.
pub(crate) async fn store(
    root: &Root,
    path: &[u8],
    mode: u32,
    source: &mut Source,
) -> Result<(), StoreError> {
    let mut writing = root.write(path, mode).await?;
    match copy(&mut writing, source).await {
        Ok(()) => Ok(writing.finish().await?),
        Err(error) => {
            writing.abandon().await;
            Err(error)
        }
    }
}

async fn copy(writing: &mut Writing, source: &mut Source) -> Result<(), StoreError> {
    while let Some(data) = source.next().await? {
        writing.add(data).await?;
    }
    Ok(())
}

impl From<UploadError> for StoreError {
    fn from(error: UploadError) -> Self {
        Self::Source(error.into())
    }
}
