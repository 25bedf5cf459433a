//! Where a sandbox's root file system comes from: the host's own programs, or an image that was
//! fetched and unpacked before under a template's name.

use crate::{Digest, Error};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// An image reference with a registry, a path and a tag fits.
const NAME_BYTES_MAX: usize = 255;

/// The template that needs no image.
const HOST: &str = "host";

/// Where a sandbox's root file system comes from.
///
/// As text: `host`, `NAME`, or `NAME@sha256:…` when the image behind the name is fixed. A session's
/// record always has the fixed form, so giving a name to another image changes no session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Template {
    /// The host's own programs, read-only, under a minimal `/etc`; nothing else of the host.
    #[default]
    Host,
    /// An image.
    Image {
        /// The template's name.
        name: TemplateName,
        /// The digest of the image's manifest; none is whichever the name stands for now.
        digest: Option<Digest>,
    },
}

/// Names a template: letters, digits and `._-/:`, so that an image reference such as
/// `registry.example/team/python:3.12` is one. Not `host`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TemplateName(String);

// === impl Template ===

impl FromStr for Template {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        if matches!(text, "" | HOST) {
            return Ok(Self::Host);
        }
        let (name, digest) = match text.split_once('@') {
            Some((name, digest)) => (name, Some(digest.parse()?)),
            None => (text, None),
        };
        let name = name.parse()?;
        Ok(Self::Image { name, digest })
    }
}

impl TryFrom<String> for Template {
    type Error = Error;
    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<Template> for String {
    fn from(template: Template) -> String {
        template.to_string()
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str(HOST),
            Self::Image { name, digest: None } => write!(f, "{name}"),
            Self::Image {
                name,
                digest: Some(digest),
            } => write!(f, "{name}@{digest}"),
        }
    }
}

// === impl TemplateName ===

impl TemplateName {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for TemplateName {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let edge = |b: &u8| b.is_ascii_alphanumeric();
        let inner = |b: &u8| edge(b) || matches!(b, b'.' | b'_' | b'-' | b'/' | b':');
        let bytes = text.as_bytes();
        let plain = bytes.len() <= NAME_BYTES_MAX
            && bytes.first().is_some_and(edge)
            && bytes.last().is_some_and(edge)
            && bytes.iter().all(inner);
        let shown = || text.chars().take(64).collect::<String>();
        if text == HOST {
            return Err(Error::invalid(
                "template \"host\" is built in: choose another name",
            ));
        }
        if !plain {
            return Err(Error::invalid(format!(
                "template name {:?} is not valid: use 1 to {NAME_BYTES_MAX} letters, digits and ._-/:, a letter or digit first and last",
                shown()
            )));
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for TemplateName {
    type Error = Error;
    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<TemplateName> for String {
    fn from(name: TemplateName) -> Self {
        name.0
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_host_a_name_or_a_pinned_name() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for text in [
            "host".to_owned(),
            "python:3.12".to_owned(),
            "registry.example:5000/a/b:1".to_owned(),
            format!("web@{digest}"),
        ] {
            let template: Template = text.parse().unwrap();
            assert_eq!(template.to_string(), text);
        }
        assert_eq!("".parse::<Template>().unwrap(), Template::Host);
        for bad in [
            "../x",
            "a b",
            "a\n",
            "-a",
            "a/",
            "@sha256:00",
            "a@sha256:00",
            &format!("host@{digest}"),
            &"a".repeat(256),
        ] {
            assert!(bad.parse::<Template>().is_err(), "{bad:?}");
        }
    }
}
