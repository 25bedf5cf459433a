//! The files in `deploy/` are up to date with the Rust types and the chart, and a real API server accepts them.
//!
//! `UPDATE_DEPLOY=1 cargo test -p k8e-operator --test deploy` regenerates the files.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod chart;
mod crds;
mod installed;

use std::fs;
use std::path::{Path, PathBuf};

/// Environment variable: if set, files are written instead of compared.
const UPDATE: &str = "UPDATE_DEPLOY";

/// The directory with what users install.
fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

/// Compares a file with its generated text, or writes it.
fn is_current(path: &Path, text: &str) {
    if std::env::var_os(UPDATE).is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        return;
    }
    let found = fs::read_to_string(path).unwrap_or_default();
    assert!(
        found == text,
        "{} is out of date: run `{UPDATE}=1 cargo test -p k8e-operator --test deploy` and commit it",
        path.display()
    );
}
