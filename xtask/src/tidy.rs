//! The house rules that rustc and clippy cannot check. Each violation says what to do about it.

mod edges;
mod map;
mod source;

use crate::{Outcome, binaries};
use std::path::{Path, PathBuf};

/// Where our Rust is.
const SOURCE_DIRS: &[&str] = &["crates", "fuzz", "xtask", "tests"];

/// How deep source folders may nest: more than this is a symlink loop.
const FOLDER_DEPTH_MAX: usize = 16;

/// Checks everything, and reports every violation at once.
pub(crate) fn run() -> Outcome {
    let mut violations = edges::check(&binaries::metadata()?);
    violations.extend(map::check()?);
    for dir in SOURCE_DIRS {
        for path in rust_files(Path::new(dir), 0)? {
            let text =
                std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            violations.extend(source::check(&path, &text));
        }
    }
    if violations.is_empty() {
        return Ok(());
    }
    let count = violations.len();
    Err(format!(
        "{}\nviolations of the house rules: {count}",
        violations.join("\n")
    ))
}

/// Every `.rs` file that a person wrote, in a stable order.
fn rust_files(dir: &Path, depth: usize) -> Result<Vec<PathBuf>, String> {
    if depth > FOLDER_DEPTH_MAX {
        return Err(format!(
            "{}: nested too deep, is this a symlink loop?",
            dir.display()
        ));
    }
    let failed = |e: std::io::Error| format!("{}: {e}", dir.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() && !path.ends_with("src/gen") {
            files.extend(rust_files(&path, depth + 1)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
