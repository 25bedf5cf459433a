//! Logging to standard error, the same for server, operator and router.

use std::io::IsTerminal as _;
use tracing_subscriber::EnvFilter;

/// Starts logging; returns whether the filter is valid. An invalid one is replaced by `info`.
pub(crate) fn to_stderr(filter: &str) -> bool {
    let filter = EnvFilter::try_new(filter);
    let known = filter.is_ok();
    tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| EnvFilter::new("info")))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    known
}

/// Starts logging with the filter of `RUST_LOG`.
pub(crate) fn by_environment() {
    let filter = std::env::var("RUST_LOG").unwrap_or_else(|_| "info".to_owned());
    if !to_stderr(&filter) {
        tracing::warn!("RUST_LOG={filter} is not a valid filter; using info");
    }
}
