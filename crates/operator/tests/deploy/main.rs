//! What people install: `deploy/` is what the types and the chart say, and a real API server takes it.
//!
//! `UPDATE_DEPLOY=1 cargo test -p k8e-operator --test deploy` writes what is generated anew.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod chart;
mod crds;
mod installed;

use std::fs;
use std::path::{Path, PathBuf};

/// Set to write files instead of comparing them.
const UPDATE: &str = "UPDATE_DEPLOY";

/// The folder that people get.
fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

/// Compares a generated file with what it should be, or writes it.
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
