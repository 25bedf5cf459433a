//! Sub-agents: sessions that share the sandbox of another.

use crate::{Error, GuestPath, SessionId, WORKSPACE};
use serde::{Deserialize, Serialize};

/// Longest type of an agent.
const KIND_BYTES_MAX: usize = 63;

/// Parent, type and working directory of a sub-agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubAgent {
    /// Parent session.
    pub parent: SessionId,
    /// What kind of agent it is, in its maker's words; may be empty.
    pub kind: String,
    /// Default working directory of its commands: absolute, the workspace or below.
    pub cwd: String,
}

/// A requested sub-agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubAgentSpec {
    /// What kind of agent it is; may be empty.
    pub kind: String,
    /// Default working directory of its commands; `None` is the workspace.
    pub path: Option<GuestPath>,
}

// === impl SubAgentSpec ===

impl SubAgentSpec {
    /// Checked: a path is below the workspace, and one of an environment's variables can hold it.
    pub fn new(kind: &str, path: &str) -> Result<Self, Error> {
        if kind.len() > KIND_BYTES_MAX || kind.chars().any(char::is_control) {
            return Err(Error::invalid(format!(
                "agent type is not valid: use at most {KIND_BYTES_MAX} bytes on one line"
            )));
        }
        let path = match path {
            "" => None,
            path => Some(GuestPath::parse(path.as_bytes())?),
        };
        Ok(Self {
            kind: kind.to_owned(),
            path: path.filter(|path| !path.as_bytes().is_empty()),
        })
    }

    /// Where its commands start.
    pub fn cwd(&self) -> String {
        match &self.path {
            // It was made of text.
            Some(path) => format!("{WORKSPACE}/{}", String::from_utf8_lossy(path.as_bytes())),
            None => WORKSPACE.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_below_the_workspace() {
        let cwd = |path: &str| SubAgentSpec::new("coder", path).map(|spec| spec.cwd());
        assert_eq!(cwd("").unwrap(), "/workspace");
        assert_eq!(cwd("/workspace/").unwrap(), "/workspace");
        assert_eq!(cwd("a/./b").unwrap(), "/workspace/a/b");
        assert_eq!(cwd("/workspace/a").unwrap(), "/workspace/a");
        for bad in ["/etc", "../x", "a\0b"] {
            assert!(cwd(bad).is_err(), "{bad:?}");
        }
        assert!(SubAgentSpec::new("a\nb", "").is_err());
    }
}
