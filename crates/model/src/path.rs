//! Paths of the file calls: always below the workspace, as bytes.

use crate::Error;

/// The part of a sandbox that is kept, listed and shared.
pub const WORKSPACE: &str = "/workspace";

const PATH_BYTES_MAX: usize = 4096;

/// Where `sandbox.v1` clients put the code that they run next, and nothing else.
const SCRATCH: &str = "/tmp";
const SCRATCH_FILES: [&str; 3] = ["_k8e_run.py", "_k8e_run.js", "_k8e_run.ts"];

/// The root file system of a sandbox, for clients whose paths are not those of a workspace (E2B).
const FILE_SYSTEM: &str = "/";

/// A path relative to the workspace; empty is the workspace itself. Of a script of a `sandbox.v1`
/// client, relative to `/tmp`; of an E2B client, relative to the root of the sandbox's file system.
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

    /// Reads an absolute path of the whole file system of a sandbox. `..` is resolved in the text, as E2B's server does,
    /// and never leads above the root.
    pub fn parse_absolute(text: &[u8]) -> Result<Self, Error> {
        if text.first() != Some(&b'/') || text.len() > PATH_BYTES_MAX || text.contains(&0) {
            return Err(Error::invalid(format!(
                "a path must be absolute, without NUL, and of at most {PATH_BYTES_MAX} bytes"
            )));
        }
        let mut parts: Vec<&[u8]> = Vec::new();
        for part in text.split(|byte| *byte == b'/') {
            match part {
                b"" | b"." => {}
                b".." => drop(parts.pop()),
                part => parts.push(part),
            }
        }
        Ok(Self {
            root: FILE_SYSTEM,
            path: parts.join(&b'/'),
        })
    }

    /// The directory that it is relative to: `/workspace`, `/tmp` for a script, or `/`.
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
    fn absolute_paths_stay_below_the_root() {
        let check = |text: &str, want: &str| {
            let path = GuestPath::parse_absolute(text.as_bytes()).unwrap();
            assert_eq!((path.root(), path.as_bytes()), ("/", want.as_bytes()));
        };
        check("/home/user/a", "home/user/a");
        check("/", "");
        check("/../../etc/./passwd", "etc/passwd");
        check("//a//b/../c/", "a/c");
        assert!(GuestPath::parse_absolute(b"a").is_err());
        assert!(GuestPath::parse_absolute(b"/a\0b").is_err());
    }

    #[test]
    fn bytes_that_are_not_utf8_are_a_path() {
        assert_eq!(
            GuestPath::parse(b"\xff\xfe").unwrap().as_bytes(),
            b"\xff\xfe"
        );
    }
}
