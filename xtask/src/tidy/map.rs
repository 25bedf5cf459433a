//! The code map names files; a map that names what is gone is worse than none.

use std::path::Path;

/// The map.
const MAP: &str = "ARCHITECTURE.md";

/// Checks that every file the map names under a crate's heading is in that crate.
pub(super) fn check() -> Result<Vec<String>, String> {
    let text = std::fs::read_to_string(MAP).map_err(|e| format!("{MAP}: {e}"))?;
    let gone = |(_, dir, file): &(usize, &str, &str)| {
        !["", "src"]
            .iter()
            .any(|inner| Path::new(dir).join(inner).join(file).exists())
    };
    Ok(named_files(&text)
        .into_iter()
        .filter(gone)
        .map(|(line, dir, file)| format!("{MAP}:{line}: {dir} has no {file}: correct the map"))
        .collect())
}

/// Line, folder and file of every name in backquotes below a heading like "### `crates/model`"
/// that looks like a file or a folder.
fn named_files(text: &str) -> Vec<(usize, &str, &str)> {
    let mut dir = None;
    let mut named = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.starts_with('#') {
            dir = line
                .strip_prefix("### `")
                .and_then(|rest| rest.split('`').next());
            continue;
        }
        let Some(dir) = dir else { continue };
        let quoted = line.split('`').skip(1).step_by(2);
        let files = quoted.filter(|name| name.ends_with(".rs") || name.ends_with('/'));
        named.extend(files.map(|file| (index + 1, dir, file)));
    }
    named
}

#[cfg(test)]
mod tests {
    use super::named_files;

    #[test]
    fn files_are_read_below_the_heading_of_their_folder() {
        let text = "`a.rs`\n### `crates/x`: why\n`b.rs` and `c/` do `d()`\n## Else\n`e.rs`\n";
        assert_eq!(
            named_files(text),
            [(3, "crates/x", "b.rs"), (3, "crates/x", "c/")]
        );
    }
}
