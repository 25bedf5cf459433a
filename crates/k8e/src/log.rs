//! Logging to stderr, the same for every role that runs for long.

use std::io::IsTerminal as _;
use tracing_subscriber::EnvFilter;

/// Starts logging. `false`: the filter makes no sense and `info` is used instead.
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

/// Starts logging as `RUST_LOG` says.
pub(crate) fn by_environment() {
    let filter = std::env::var("RUST_LOG").unwrap_or_else(|_| "info".to_owned());
    if !to_stderr(&filter) {
        tracing::warn!("RUST_LOG={filter} makes no sense; using info");
    }
}
