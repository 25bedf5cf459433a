//! Who is asking.

use serde::{Deserialize, Serialize};

/// Who is asking, as a door established it. Owns the sessions it makes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Principal {
    name: String,
    operator: bool,
}

// === impl Principal ===

impl Principal {
    /// Root on this machine, or who it lets in by the socket's group: sees every session.
    pub fn local() -> Self {
        Self {
            name: "local".to_owned(),
            operator: true,
        }
    }

    /// The holder of a client certificate: sees its own sessions.
    pub fn certificate(common_name: &str) -> Self {
        Self {
            name: format!("cert:{common_name}"),
            operator: false,
        }
    }

    /// As it is stored as the owner of what it makes.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether what `owner` made is this principal's to use.
    pub fn may_use(&self, owner: &str) -> bool {
        self.operator || self.name == owner
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_cannot_name_itself_local() {
        let posing = Principal::certificate("local");
        assert!(!posing.may_use(Principal::local().name()));
        assert!(Principal::local().may_use(posing.name()));
        assert!(!posing.may_use(Principal::certificate("other").name()));
    }
}
