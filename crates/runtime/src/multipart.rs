//! Forms of requests, read from their bounded bodies.

use crate::http::{Upload, UploadError};
use bytes::Bytes;
use k8e_net::multipart::Chunks;

pub(crate) use k8e_net::multipart::boundary;

/// A form that is being parsed.
pub(crate) type Multipart = k8e_net::multipart::Multipart<Upload>;

/// Why a form could not be parsed.
pub(crate) type MultipartError = k8e_net::multipart::MultipartError<UploadError>;

impl Chunks for Upload {
    type Error = UploadError;

    async fn next(&mut self) -> Result<Option<Bytes>, UploadError> {
        Self::next(self).await
    }
}
