//! Names that come out of a sandbox: which of them may become names on this machine.

use super::printable;
use crate::failure::Failure;
use std::path::{Path, PathBuf};

/// Bytes below `root` as a relative path of this machine, or why it cannot be one. It has only plain components, so that
/// joined to a directory it stays in it.
pub(super) fn relative(root: &[u8], path: &[u8]) -> Result<PathBuf, Failure> {
    let refused = |why: &str| {
        let shown = printable(&String::from_utf8_lossy(path));
        Err(Failure::request(
            format!("{shown:?} in the sandbox cannot be copied: {why}; nothing was copied"),
            "invalid",
        ))
    };
    let below = path
        .strip_prefix(root)
        .and_then(|below| below.strip_prefix(b"/"));
    let Some(below) = below else {
        return refused("it is outside the directory that was asked for");
    };
    let mut relative = PathBuf::new();
    for name in below.split(|byte| *byte == b'/') {
        if matches!(name, b"" | b"." | b"..") || name.contains(&0) {
            return refused("its name is not one of a file");
        }
        match component(name) {
            Some(name) => relative.push(name),
            None => return refused("this system has no such names"),
        }
    }
    Ok(relative)
}

/// The directory that a listing is of: that of its first entry, which the listing begins with.
pub(super) fn root(first: &[u8]) -> &[u8] {
    let end = first.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
    &first[..end]
}

/// One name of a file as this system has it.
#[cfg(unix)]
fn component(name: &[u8]) -> Option<&Path> {
    use std::os::unix::ffi::OsStrExt as _;
    Some(Path::new(std::ffi::OsStr::from_bytes(name)))
}

/// One name of a file as this system has it: separators, drives, alternate streams and device names are none.
#[cfg(not(unix))]
fn component(name: &[u8]) -> Option<&Path> {
    let text = std::str::from_utf8(name).ok()?;
    is_plain_on_windows(text).then(|| Path::new(text))
}

/// Whether Windows takes a name for one file in the current directory.
#[cfg(any(not(unix), test))]
fn is_plain_on_windows(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or_default().trim_end();
    let is_device = ["con", "prn", "aux", "nul", "conin$", "conout$"]
        .iter()
        .any(|device| stem.eq_ignore_ascii_case(device));
    let is_port = stem.len() >= 4
        && stem.is_char_boundary(3)
        && ["com", "lpt"]
            .iter()
            .any(|port| stem[..3].eq_ignore_ascii_case(port))
        && stem[3..]
            .chars()
            .all(|digit| digit.is_ascii_digit() || "¹²³".contains(digit));
    let is_forbidden = |char: char| {
        char.is_control() || matches!(char, '\\' | ':' | '*' | '?' | '"' | '<' | '>' | '|')
    };
    !is_device && !is_port && !name.contains(is_forbidden) && !name.ends_with(['.', ' '])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_below_the_target() {
        let at = |path: &str| relative(b"/workspace/out", path.as_bytes());
        assert_eq!(at("/workspace/out/a/b").unwrap(), Path::new("a/b"));
        assert_eq!(at("/workspace/out/a:b\\c").unwrap(), Path::new("a:b\\c"));
        for hostile in [
            "/workspace/out/../../etc/passwd",
            "/workspace/out/a/../b",
            "/workspace/out/..",
            "/workspace/out/.",
            "/workspace/out/",
            "/workspace/out//etc/passwd",
            "/workspace/out",
            "/workspace/outside/a",
            "/etc/passwd",
            "relative",
            "",
            "/workspace/out/a\0b",
        ] {
            assert!(at(hostile).is_err(), "{hostile:?}");
        }
        assert_eq!(root(b"/workspace/out/first"), b"/workspace/out");
        assert_eq!(root(b"first"), b"");
    }

    #[test]
    fn names_that_windows_takes_for_something_else() {
        for plain in ["a.txt", "console", "com", "com10x", "auxiliary", "ü"] {
            assert!(is_plain_on_windows(plain), "{plain}");
        }
        for other in [
            "CON", "nul.txt", "COM1", "lpt9.log", "com¹", "a:b", "C:", "a\\b", "..\\x", "a.", "a ",
            "a?", "a\n",
        ] {
            assert!(!is_plain_on_windows(other), "{other:?}");
        }
    }
}
