//! Code map check: every file that `ARCHITECTURE.md` names must exist.

use std::path::Path;

/// The document with the code map.
const MAP: &str = "ARCHITECTURE.md";

/// The section whose paths start at the root of the repository.
const ENTRY_POINTS: &str = "## Entry points";

/// Checks that every file named below the heading of a crate is in that crate, and that every entry
/// point exists.
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

/// Line, folder and file of every name in backquotes (in text, lists or tables) that looks like a
/// file or a folder, below [`ENTRY_POINTS`] or a heading like "### `crates/model`".
fn named_files(text: &str) -> Vec<(usize, &str, &str)> {
    let mut dir = None;
    let mut named = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.starts_with('#') {
            dir = match line.strip_prefix("### `") {
                Some(rest) => rest.split('`').next(),
                None => (line == ENTRY_POINTS).then_some("."),
            };
            continue;
        }
        let Some(dir) = dir else { continue };
        let quoted = line.split('`').skip(1).step_by(2);
        let files = quoted.filter(|name| {
            name.ends_with(".rs") || name.ends_with(".proto") || name.ends_with('/')
        });
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

    #[test]
    fn files_are_read_from_tables_and_entry_points() {
        let text = "## Entry points\n| `a/b.proto` | `T` |\n### `fuzz`\n| `c.rs`, `d/` | `e` |\n";
        assert_eq!(
            named_files(text),
            [
                (2, ".", "a/b.proto"),
                (4, "fuzz", "c.rs"),
                (4, "fuzz", "d/")
            ]
        );
    }
}
