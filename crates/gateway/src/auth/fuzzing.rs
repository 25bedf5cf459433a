//! Credentials parsed from arbitrary bytes. For the crate `fuzz`.

use k8e_model::ApiKey;

pub use super::tls::fuzzing::certificate_request;

/// The API key in an `authorization` header, if it is one.
pub fn bearer(text: &str) -> Option<ApiKey> {
    super::bearer(text)
}
