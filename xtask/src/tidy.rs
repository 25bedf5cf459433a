//! The house rules that rustc and clippy cannot check. Each violation says what to do about it.

mod edges;
mod map;
mod markdown;
mod prose;
mod source;
mod terms;
mod words;

use crate::{Outcome, binaries};
use std::path::{Path, PathBuf};

/// Folders in the root of the repository that hold nothing that a person wrote.
const FOREIGN_DIRS: &[&str] = &[".git", "target"];

/// Where our Rust is.
const SOURCE_DIRS: &[&str] = &["crates", "fuzz", "xtask", "tests"];

/// How deep source folders may nest: more than this is a symlink loop.
const FOLDER_DEPTH_MAX: usize = 16;

/// Checks everything, and reports every violation at once.
pub(crate) fn run() -> Outcome {
    let metadata = binaries::metadata()?;
    let mut violations = edges::check(&metadata);
    violations.extend(map::check()?);
    violations.extend(terms::check(&metadata)?);
    for dir in SOURCE_DIRS {
        for path in files(Path::new(dir), "rs", 0)? {
            let text = read(&path)?;
            violations.extend(source::check(&path, &text));
            violations.extend(words::check_rust(&path, &text));
        }
    }
    for path in files(Path::new("."), "md", 0)? {
        let text = read(&path)?;
        violations.extend(markdown::check(&path, &text));
        violations.extend(words::check_markdown(&path, &text));
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

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// Every file with that extension that a person wrote, in a stable order.
fn files(dir: &Path, extension: &str, depth: usize) -> Result<Vec<PathBuf>, String> {
    if depth > FOLDER_DEPTH_MAX {
        return Err(format!(
            "{}: nested too deep, is this a symlink loop?",
            dir.display()
        ));
    }
    let failed = |e: std::io::Error| format!("{}: {e}", dir.display());
    let is_foreign = |path: &Path| {
        let in_root = depth == 0 && FOREIGN_DIRS.iter().any(|foreign| path.ends_with(foreign));
        in_root || path.ends_with("src/gen") || path.ends_with("node_modules")
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() {
            if !is_foreign(&path) {
                found.extend(files(&path, extension, depth + 1)?);
            }
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
