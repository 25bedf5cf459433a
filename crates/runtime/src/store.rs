//! File upload: writes a file from a raw request body or from a form.

use crate::agent::{Failure, FileWriter, Root};
use crate::http::{Upload, UploadError};
use crate::multipart::{Multipart, MultipartError};
use bytes::Bytes;

/// Source of the uploaded bytes.
pub(crate) enum Source {
    /// The whole request body.
    Raw(Upload),
    /// The current part of a form.
    Form(Multipart),
}

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// The guest could not write the file.
    #[error(transparent)]
    Failure(#[from] Failure),
    /// The request body could not be read.
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

    /// Drains the rest of the body, within limits, so that a client that is still sending can read the response.
    pub(crate) async fn discard(&mut self) {
        match self {
            Self::Raw(body) => body.discard().await,
            Self::Form(form) => form.body().discard().await,
        }
    }
}

/// Writes a file atomically. When that fails, nothing of it is left when this returns.
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

async fn copy(writing: &mut FileWriter, source: &mut Source) -> Result<(), StoreError> {
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
