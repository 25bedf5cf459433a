//! Files of those names that have some.

use std::path::{Component, Path};

/// What a path leads to.
#[derive(Debug)]
pub(super) enum Found {
    /// This.
    File { kind: &'static str, data: Vec<u8> },
    /// The name has files, this is none of them.
    Nothing,
    /// The name has no files.
    NoSite,
}

/// What stands for a folder.
const INDEXES: [(&str, &str); 2] = [
    ("index.html", "text/html"),
    ("index.json", "application/json"),
];

/// Reads a file of a name.
pub(super) fn read(files: &Path, name: &str, path: &str) -> Found {
    let site = files.join(name);
    if name.is_empty() || name.contains('/') || name.starts_with('.') || !site.is_dir() {
        return Found::NoSite;
    }
    let path = Path::new(path.trim_start_matches('/'));
    if !path
        .components()
        .all(|part| matches!(part, Component::Normal(_)))
    {
        return Found::Nothing;
    }
    let file = site.join(path);
    if let Ok(data) = std::fs::read(&file) {
        return Found::File {
            kind: "application/octet-stream",
            data,
        };
    }
    let index = |(index, kind): (&str, &'static str)| {
        let data = std::fs::read(file.join(index)).ok()?;
        Some(Found::File { kind, data })
    };
    INDEXES
        .into_iter()
        .find_map(index)
        .unwrap_or(Found::Nothing)
}
