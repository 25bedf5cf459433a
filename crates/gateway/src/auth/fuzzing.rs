//! What a caller proves himself with, read from anything. For the crate `fuzz`.

use k8e_model::ApiKey;

pub use super::tls::fuzzing::certificate_request;

/// The key in an `authorization` header, if that is what it is.
pub fn bearer(text: &str) -> Option<ApiKey> {
    super::bearer(text)
}
