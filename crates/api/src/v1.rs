//! Generated from `proto/k8e/v1`; do not edit, run `cargo xtask codegen`. By hand is only how
//! messages with something secret are printed: without it.
#![allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    clippy::wildcard_enum_match_arm,
    clippy::large_futures,
    reason = "generated"
)]

include!("gen/k8e.v1.rs");

impl std::fmt::Debug for SetSecretRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SetSecretRequest")
            .field("name", &self.name)
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for CreateKeyResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreateKeyResponse")
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for ExposedService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExposedService")
            .field("session_id", &self.session_id)
            .field("port", &self.port)
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for RegistryCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegistryCredentials")
            .finish_non_exhaustive()
    }
}

/// The service's own description, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("gen/k8e.v1.bin");
