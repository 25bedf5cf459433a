//! An OCI image, as a session uses it: its layers, and what its configuration says about commands.

use crate::{Env, Error};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What Docker allows; overlayfs would take 500.
pub const IMAGE_LAYERS_MAX: usize = 127;

/// SHA-256, in hexadecimal digits.
const HEX_CHARS: usize = 64;

/// The only algorithm that registries use.
const SHA256: &str = "sha256:";

/// Of an entry point or command in an image's configuration.
const ARGS_MAX: usize = 256;
const ARGS_BYTES_MAX: usize = 32 * 1024;

/// Of a working directory or a user's name in an image's configuration.
const TEXT_BYTES_MAX: usize = 4096;

/// A SHA-256 digest as OCI writes it: `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

/// An image whose layers are unpacked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Of its manifest: names the image whatever tags are moved.
    pub digest: Digest,
    /// DiffIDs of its layers, the lowest first; at least one.
    pub layers: Vec<Digest>,
    /// What it says about commands.
    #[serde(default)]
    pub config: ImageConfig,
}

/// What the configuration of an image says about the commands that run in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// Below the session's own environment.
    #[serde(default)]
    pub env: Env,
    /// A user name or number; none is root. A group behind a colon is left out.
    #[serde(default)]
    pub user: Option<String>,
    /// Where commands run that name no directory; none is the workspace.
    #[serde(default)]
    pub workdir: Option<String>,
    /// Shown, and started only when somebody asks for it.
    #[serde(default)]
    pub entrypoint: Vec<String>,
    /// Arguments of the entry point.
    #[serde(default)]
    pub cmd: Vec<String>,
}

// === impl Digest ===

impl Digest {
    /// From the 32 bytes of a SHA-256.
    pub fn from_bytes(bytes: &[u8; 32]) -> Self {
        use fmt::Write as _;
        let mut text = String::with_capacity(SHA256.len() + HEX_CHARS);
        text.push_str(SHA256);
        for byte in bytes {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
        }
        Self(text)
    }

    /// With the algorithm, as in `sha256:0a…`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The hexadecimal digits alone: a file name.
    pub fn hex(&self) -> &str {
        &self.0[SHA256.len()..]
    }
}

impl FromStr for Digest {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        match text.strip_prefix(SHA256) {
            Some(hex) if hex.len() == HEX_CHARS && hex.bytes().all(digit) => {
                Ok(Self(text.to_owned()))
            }
            _ => Err(Error::invalid(format!(
                "digest {:?} is not valid: use sha256: and {HEX_CHARS} lower-case hexadecimal digits",
                text.chars().take(80).collect::<String>()
            ))),
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = Error;
    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

// === impl ImageConfig ===

impl ImageConfig {
    /// Checks the sizes of what an image's configuration says, and takes what commands can use of it.
    pub fn checked(
        env: Env,
        user: &str,
        workdir: &str,
        entrypoint: Vec<String>,
        cmd: Vec<String>,
    ) -> Result<Self, Error> {
        let user = user.split(':').next().unwrap_or_default();
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if user.len() > TEXT_BYTES_MAX || !user.chars().all(plain) {
            return Err(Error::invalid(
                "the image's user is not a name or number: use letters, digits and -_.",
            ));
        }
        if workdir.len() > TEXT_BYTES_MAX || workdir.contains('\0') {
            return Err(Error::invalid(format!(
                "the image's working directory must be at most {TEXT_BYTES_MAX} bytes without NUL"
            )));
        }
        let bytes: usize = entrypoint.iter().chain(&cmd).map(String::len).sum();
        if entrypoint.len() + cmd.len() > ARGS_MAX || bytes > ARGS_BYTES_MAX {
            return Err(Error::invalid(format!(
                "the image's entry point and command have more than {ARGS_MAX} arguments or {ARGS_BYTES_MAX} bytes"
            )));
        }
        let workdir = match workdir {
            "" => None,
            absolute if absolute.starts_with('/') => Some(absolute.to_owned()),
            relative => Some(format!("/{relative}")),
        };
        Ok(Self {
            env,
            user: Some(user.to_owned()).filter(|user| !user.is_empty()),
            workdir,
            entrypoint,
            cmd,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_have_one_spelling() {
        let text = format!("sha256:{}", "0a".repeat(32));
        let digest: Digest = text.parse().unwrap();
        assert_eq!(digest, Digest::from_bytes(&[0x0a; 32]));
        assert_eq!(digest.hex(), &text[7..]);
        for bad in [
            "",
            "sha256:",
            &text[7..],
            &text[..70],
            &text.to_uppercase(),
            &format!("sha512:{}", "0a".repeat(32)),
            &format!("{text}/../x"),
        ] {
            assert!(bad.parse::<Digest>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_a_configuration_says_is_bounded() {
        let config = |user: &str, workdir: &str| {
            ImageConfig::checked(Env::default(), user, workdir, vec![], vec![])
        };
        let plain = config("node:node", "app").unwrap();
        assert_eq!(plain.user.as_deref(), Some("node"));
        assert_eq!(plain.workdir.as_deref(), Some("/app"));
        assert_eq!(config("", "").unwrap(), ImageConfig::default());
        assert!(config("a b", "").is_err());
        assert!(config("", "/a\0b").is_err());
        let many = vec![String::new(); ARGS_MAX + 1];
        assert!(ImageConfig::checked(Env::default(), "", "", many, vec![]).is_err());
    }
}
