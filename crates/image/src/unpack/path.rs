//! The path of an entry: components below the root, none of which leads up or is too long.

use crate::error::ImageError;

/// The kernel's own bounds.
const PATH_BYTES_MAX: usize = 4096;
const NAME_BYTES_MAX: usize = 255;

/// Deeper than any package; a tree of this depth can still be removed without a thought about stacks.
const DEPTH_MAX: usize = 128;

/// What of a path is shown in an error.
const SHOWN_BYTES_MAX: usize = 200;

/// A path below the root: components with a slash between. Empty is the root itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct EntryPath(Vec<u8>);

// === impl EntryPath ===

impl EntryPath {
    /// Takes an absolute path as one below the root; refuses `..`.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, ImageError> {
        let shown =
            || String::from_utf8_lossy(&bytes[..bytes.len().min(SHOWN_BYTES_MAX)]).into_owned();
        if bytes.len() > PATH_BYTES_MAX || bytes.contains(&0) {
            let path = shown();
            return Err(ImageError::invalid(format!(
                "{path:?}… in the layer is refused: a path has at most {PATH_BYTES_MAX} bytes"
            )));
        }
        let mut path = Self::default();
        let mut depth = 0;
        for name in bytes.split(|byte| *byte == b'/') {
            if matches!(name, b"" | b".") {
                continue;
            }
            depth += 1;
            if name == b".." || name.len() > NAME_BYTES_MAX || depth > DEPTH_MAX {
                let path = shown();
                return Err(ImageError::invalid(format!(
                    "{path:?} in the layer is refused: no \"..\", names of at most {NAME_BYTES_MAX} bytes, {DEPTH_MAX} directories deep at most"
                )));
            }
            path.push(name);
        }
        Ok(path)
    }

    /// The last component; none of the root.
    pub(super) fn name(&self) -> Option<&[u8]> {
        self.0
            .rsplit(|byte| *byte == b'/')
            .next()
            .filter(|name| !name.is_empty())
    }

    /// The directory that it is in; the root's is the root.
    pub(super) fn parent(&self) -> Self {
        let end = self.0.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        Self(self.0[..end].to_vec())
    }

    /// One more component, which must be a name.
    pub(super) fn join(mut self, name: &[u8]) -> Result<Self, ImageError> {
        if matches!(name, b"" | b"." | b"..") || name.contains(&b'/') {
            return Err(self.refused("a whiteout in it names nothing"));
        }
        self.push(name);
        Ok(self)
    }

    pub(super) fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn is_below(&self, dir: &[u8]) -> bool {
        self.0
            .strip_prefix(dir)
            .is_some_and(|rest| rest.starts_with(b"/"))
    }

    pub(super) fn components(&self) -> impl Iterator<Item = &[u8]> {
        self.0
            .split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty())
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Why an entry of this path cannot be taken.
    pub(super) fn refused(&self, why: &str) -> ImageError {
        ImageError::invalid(format!("{:?} in the layer is refused: {why}", self.shown()))
    }

    pub(super) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.0[..self.0.len().min(SHOWN_BYTES_MAX)]).into_owned()
    }

    fn push(&mut self, name: &[u8]) {
        if !self.0.is_empty() {
            self.0.push(b'/');
        }
        self.0.extend_from_slice(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn paths_stay_below_the_root() {
        let path = |text: &str| EntryPath::parse(text.as_bytes()).map(|path| path.shown());
        assert_eq!(path("./usr//bin/./sh").unwrap(), "usr/bin/sh");
        assert_eq!(path("/etc/passwd").unwrap(), "etc/passwd");
        assert_eq!(path("./").unwrap(), "");
        for bad in [
            "..",
            "../x",
            "a/../../x",
            "a/..",
            "/..",
            &"a/".repeat(129),
            &"n".repeat(256),
        ] {
            assert!(path(bad).is_err(), "{bad}");
        }
        let deep = EntryPath::parse(b"a/b/c").unwrap();
        assert_eq!(
            (deep.name(), deep.parent().shown()),
            (Some(&b"c"[..]), "a/b".to_owned())
        );
        assert_eq!(EntryPath::default().name(), None);
        assert!(EntryPath::parse(b"dev/null").unwrap().is_below(b"dev"));
        assert!(!EntryPath::parse(b"devices/null").unwrap().is_below(b"dev"));
        assert!(EntryPath::default().join(b"..").is_err());
    }

    proptest! {
        #[test]
        fn whatever_is_taken_has_no_way_up(bytes in prop::collection::vec(prop::sample::select(&b"./ab\\\0\xff"[..]), 0..40)) {
            if let Ok(path) = EntryPath::parse(&bytes) {
                prop_assert!(path.components().all(|name| !matches!(name, b"" | b"." | b"..")));
                prop_assert_eq!(&EntryPath::parse(path.as_bytes()).unwrap(), &path);
            }
        }
    }
}
