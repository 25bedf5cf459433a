//! Snapshots, as far as this server knows of them: a name and the layers that it is made of.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Fits a file name with room for a suffix.
const NAME_BYTES_MAX: usize = 128;

/// K8E squashes above 32; with layers of 4 MiB this is 4 GiB.
const LAYERS_MAX: usize = 1024;

/// SHA-256, in hexadecimal digits.
const DIGEST_CHARS: usize = 64;

/// Names a snapshot of its owner's.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SnapshotName(String);

/// The layers of a snapshot, the lowest first: SHA-256 digests, at least one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct SnapshotLayers(Vec<String>);

// === impl SnapshotName ===

impl SnapshotName {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SnapshotName {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let edge = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let inner = |b: &u8| edge(b) || matches!(b, b'.' | b'_' | b'-');
        let bytes = text.as_bytes();
        if bytes.len() <= NAME_BYTES_MAX
            && bytes.first().is_some_and(edge)
            && bytes.iter().all(inner)
        {
            return Ok(Self(text.to_owned()));
        }
        let shown: String = text.chars().take(NAME_BYTES_MAX).collect();
        Err(Error::invalid(format!(
            "snapshot name {shown:?} is not valid: use 1 to {NAME_BYTES_MAX} lower-case letters, digits and ._-, a letter or digit first"
        )))
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

// === impl SnapshotLayers ===

impl SnapshotLayers {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

impl TryFrom<Vec<String>> for SnapshotLayers {
    type Error = Error;
    fn try_from(layers: Vec<String>) -> Result<Self, Error> {
        if layers.is_empty() || layers.len() > LAYERS_MAX {
            return Err(Error::invalid(format!(
                "a snapshot has 1 to {LAYERS_MAX} layers, not {}",
                layers.len()
            )));
        }
        let digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        let digest = |text: &String| text.len() == DIGEST_CHARS && text.bytes().all(digit);
        match layers.iter().position(|layer| !digest(layer)) {
            None => Ok(Self(layers)),
            Some(at) => Err(Error::invalid(format!(
                "layer {at} of the snapshot is not a SHA-256 digest: {DIGEST_CHARS} lower-case hexadecimal digits"
            ))),
        }
    }
}

impl From<SnapshotLayers> for Vec<String> {
    fn from(layers: SnapshotLayers) -> Self {
        layers.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in ["a", "0", "web-1.2_x", "a..b", &"a".repeat(128)] {
            assert_eq!(good.parse::<SnapshotName>().unwrap().as_str(), good);
        }
        for bad in [
            "",
            ".",
            "..",
            "../x",
            "-a",
            "_a",
            "A",
            "a/b",
            "a\\b",
            "a\0",
            "é",
            &"a".repeat(129),
        ] {
            assert!(bad.parse::<SnapshotName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn layers_are_digests_and_bounded() {
        let digest = "0a".repeat(32);
        let layers = |list: Vec<String>| SnapshotLayers::try_from(list);
        assert_eq!(
            layers(vec![digest.clone(); LAYERS_MAX]).unwrap().count(),
            LAYERS_MAX
        );
        assert!(layers(vec![digest.clone(); LAYERS_MAX + 1]).is_err());
        assert!(layers(vec![]).is_err());
        for bad in [
            "",
            "0A",
            &digest[1..],
            &digest.to_uppercase(),
            "../../etc/passwd",
        ] {
            assert!(
                layers(vec![digest.clone(), bad.to_owned()]).is_err(),
                "{bad}"
            );
        }
    }
}
