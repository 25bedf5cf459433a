//! Runtimes: the kinds of isolation of a sandbox.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Runtime of a sandbox: its kind of isolation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuntimeKind {
    /// Namespaces, user namespace, seccomp, Landlock, cgroups. Shares the host's kernel.
    Native,
    /// runsc: a separate kernel in user space.
    Gvisor,
    /// A microVM.
    Firecracker,
    /// A VM by kata-runtime.
    Kata,
}

// === impl RuntimeKind ===

impl RuntimeKind {
    /// As it is written in requests and answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Gvisor => "gvisor",
            Self::Firecracker => "firecracker",
            Self::Kata => "kata",
        }
    }
}

impl fmt::Display for RuntimeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for RuntimeKind {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "native" => Ok(Self::Native),
            "gvisor" => Ok(Self::Gvisor),
            "firecracker" => Ok(Self::Firecracker),
            "kata" => Ok(Self::Kata),
            _ => Err(Error::invalid(format!(
                "runtime {:?} is not known: use native, gvisor, firecracker or kata",
                text.chars().take(32).collect::<String>()
            ))),
        }
    }
}
