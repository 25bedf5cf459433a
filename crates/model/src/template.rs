//! Where a sandbox's root file system comes from.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Where a sandbox's root file system comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Template {
    /// The host's own programs, read-only, under a minimal `/etc`; nothing else of the host.
    #[default]
    Host,
}

// === impl Template ===

impl FromStr for Template {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "" | "host" => Ok(Self::Host),
            _ => Err(Error::invalid(format!(
                "template {:?} is not known: this server has `host`",
                text.chars().take(64).collect::<String>()
            ))),
        }
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
            Self::Host => f.write_str("host"),
        }
    }
}
