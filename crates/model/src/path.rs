//! Paths of the file calls: always below the workspace, as bytes.

use crate::Error;

/// The part of a sandbox that is kept, listed and shared.
pub const WORKSPACE: &str = "/workspace";

const PATH_BYTES_MAX: usize = 4096;

/// Where `sandbox.v1` clients put the code that they run next, and nothing else.
const SCRATCH: &str = "/tmp";
const SCRATCH_FILES: [&str; 3] = ["_k8e_run.py", "_k8e_run.js", "_k8e_run.ts"];

/// A path relative to the workspace; empty is the workspace itself. Of a script of a `sandbox.v1`
/// client, relative to `/tmp`.
///
/// Holds no `..`, no NUL, no empty or `.` component. Symbolic links are the guest's to check,
/// where they are resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestPath {
    root: &'static str,
    path: Vec<u8>,
}

// === impl GuestPath ===

impl GuestPath {
    /// Reads a path as a user gives it: relative to the workspace, or absolute below it.
    pub fn parse(text: &[u8]) -> Result<Self, Error> {
        let shown = || String::from_utf8_lossy(&text[..text.len().min(256)]).into_owned();
        if text.is_empty() {
            return Err(Error::invalid(
                "path is empty: name a file below /workspace",
            ));
        }
        if text.len() > PATH_BYTES_MAX {
            return Err(Error::invalid(format!(
                "path is {} bytes, at most {PATH_BYTES_MAX} are allowed",
                text.len()
            )));
        }
        if text.contains(&0) {
            return Err(Error::invalid(format!(
                "path {:?} contains NUL, which no file name can",
                shown()
            )));
        }
        let mut parts = text
            .split(|b| *b == b'/')
            .filter(|part| !matches!(*part, b"" | b"."));
        if text[0] == b'/' && parts.next() != Some(&WORKSPACE.as_bytes()[1..]) {
            return Err(Error::invalid(format!(
                "path {:?} is outside {WORKSPACE}: the file calls work below {WORKSPACE}; use `k8e sandbox exec` for the rest",
                shown()
            )));
        }
        let parts: Vec<&[u8]> = parts.collect();
        if parts.contains(&&b".."[..]) {
            return Err(Error::invalid(format!(
                "path {:?} contains '..': write it without",
                shown()
            )));
        }
        Ok(Self {
            root: WORKSPACE,
            path: parts.join(&b'/'),
        })
    }

    /// The same, or one of the three files in `/tmp` that `sandbox.v1` clients write their code to.
    pub fn parse_script(text: &[u8]) -> Result<Self, Error> {
        let mut names = SCRATCH_FILES.iter();
        match names.find(|name| text == format!("{SCRATCH}/{name}").as_bytes()) {
            Some(name) => Ok(Self {
                root: SCRATCH,
                path: name.as_bytes().to_vec(),
            }),
            None => Self::parse(text),
        }
    }

    /// The directory that it is relative to: `/workspace`, or `/tmp` for a script.
    pub fn root(&self) -> &'static str {
        self.root
    }

    /// Relative to its root; empty is the root.
    pub fn as_bytes(&self) -> &[u8] {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_may_be_in_tmp() {
        let script = GuestPath::parse_script(b"/tmp/_k8e_run.py").unwrap();
        assert_eq!(
            (script.root(), script.as_bytes()),
            ("/tmp", &b"_k8e_run.py"[..])
        );
        let usual = GuestPath::parse_script(b"/workspace/a").unwrap();
        assert_eq!((usual.root(), usual.as_bytes()), (WORKSPACE, &b"a"[..]));
        for other in [
            "/tmp/x.py",
            "/tmp/_k8e_run.sh",
            "/tmp/../etc/passwd",
            "/tmp",
            "/tmp/a/_k8e_run.py",
        ] {
            assert!(
                GuestPath::parse_script(other.as_bytes()).is_err(),
                "{other}"
            );
        }
        assert!(GuestPath::parse(b"/tmp/_k8e_run.py").is_err());
    }

    #[test]
    fn paths_are_normalised_or_refused() {
        let check = |text: &str, want: &str| {
            assert_eq!(
                GuestPath::parse(text.as_bytes()).unwrap().as_bytes(),
                want.as_bytes()
            )
        };
        check("a.txt", "a.txt");
        check("/workspace/a/b", "a/b");
        check("/workspace", "");
        check("//workspace//./a/", "a");
        check("a/.../b", "a/.../b");
        for bad in [
            "",
            "/etc/passwd",
            "..",
            "a/../b",
            "/workspace/../etc",
            "a\0b",
            "/workspaces/x",
            "/",
            &"a".repeat(5000),
        ] {
            assert!(GuestPath::parse(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn bytes_that_are_not_utf8_are_a_path() {
        assert_eq!(
            GuestPath::parse(b"\xff\xfe").unwrap().as_bytes(),
            b"\xff\xfe"
        );
    }
}
