//! Approvals: requests of an agent that a person decides on.

use crate::{ApprovalId, Error, KeyId, Principal, SessionId, UnixMillis};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Longest description of an action: a page of text, which a person has to read.
const ACTION_BYTES_MAX: usize = 4 * 1024;

/// Longest reason of a decision: a few sentences.
const REASON_BYTES_MAX: usize = 1024;

/// Default timeout of a request, as in the Go K8E.
const OPEN_DEFAULT: Duration = Duration::from_secs(5 * 60);

/// Longest timeout of a request: after a day the situation may have changed.
const OPEN_MAX: Duration = Duration::from_secs(24 * 3600);

/// Credential of a caller, to compare whether two calls used the same one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Proof {
    /// Peer credentials of the kernel, on the Unix socket.
    Local,
    /// An API key, or a certificate issued for it.
    Key(KeyId),
    /// A certificate of the server itself, by its common name, since it is renewed.
    Certificate(String),
}

/// Caller of an approval call: principal, credential and session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Its principal.
    pub principal: Principal,
    /// Its credential.
    pub proof: Proof,
    /// The session that it says it works in.
    pub session: Option<SessionId>,
}

/// Description of an action for a person to read: printable text without control characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalAction(String);

/// Reason of a decision; may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApprovalReason(String);

/// Timeout of an approval request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApprovalTime(Duration);

/// An approval request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Approval {
    /// Random id.
    pub id: ApprovalId,
    /// The session that it is about.
    pub session: SessionId,
    /// Owner of the session.
    pub owner: String,
    /// The action to approve.
    pub action: ApprovalAction,
    /// The requester.
    pub asked_by: ApprovalParty,
    /// When.
    pub asked_at: UnixMillis,
    /// Time of expiry.
    pub expires_at: UnixMillis,
    /// Its state.
    pub state: ApprovalState,
}

/// A requester or decider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalParty {
    /// The principal's name.
    pub principal: String,
    /// Its credential.
    pub proof: Proof,
}

/// State of an approval request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApprovalState {
    /// Not decided yet.
    Pending,
    /// Decided.
    Decided(Box<ApprovalDecision>),
    /// Not decided in time, or its session has ended.
    Expired,
}

/// The decision on a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalDecision {
    /// Whether it was approved.
    pub approved: bool,
    /// Reason of the decision.
    pub reason: ApprovalReason,
    /// The decider.
    pub by: ApprovalParty,
    /// When.
    pub at: UnixMillis,
}

// === impl Proof ===

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("local"),
            Self::Key(id) => write!(f, "key:{id}"),
            Self::Certificate(name) => write!(f, "certificate:{name}"),
        }
    }
}

impl FromStr for Proof {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        match text.split_once(':') {
            None if text == "local" => Ok(Self::Local),
            Some(("key", id)) => id.parse().map(Self::Key),
            Some(("certificate", name)) => Ok(Self::Certificate(name.to_owned())),
            _ => Err(Error::invalid("this is no proof of who calls")),
        }
    }
}

// === impl Caller ===

impl Caller {
    /// As stored.
    pub fn party(&self) -> ApprovalParty {
        ApprovalParty {
            principal: self.principal.name().to_owned(),
            proof: self.proof.clone(),
        }
    }
}

// === impl ApprovalAction ===

impl ApprovalAction {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ApprovalAction {
    type Error = Error;
    fn try_from(text: String) -> Result<Self, Error> {
        if text.trim().is_empty() {
            return Err(Error::invalid(
                "an approval needs an action: say what is to be approved",
            ));
        }
        check_text(&text, "action", ACTION_BYTES_MAX).map(|()| Self(text))
    }
}

// === impl ApprovalReason ===

impl ApprovalReason {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ApprovalReason {
    type Error = Error;
    fn try_from(text: String) -> Result<Self, Error> {
        check_text(&text, "reason", REASON_BYTES_MAX).map(|()| Self(text))
    }
}

// === impl ApprovalTime ===

impl ApprovalTime {
    /// Milliseconds of a request; 0 is the default.
    pub fn from_ms(ms: u64) -> Result<Self, Error> {
        match Duration::from_millis(ms) {
            Duration::ZERO => Ok(Self::default()),
            time if time <= OPEN_MAX => Ok(Self(time)),
            _ => Err(Error::invalid(
                "an approval can be open for 24 hours at most: ask again after that",
            )),
        }
    }

    /// How long.
    pub fn as_duration(self) -> Duration {
        self.0
    }
}

impl Default for ApprovalTime {
    fn default() -> Self {
        Self(OPEN_DEFAULT)
    }
}

// === impl Approval ===

impl Approval {
    /// Time between request and expiry.
    pub fn open_for(&self) -> Duration {
        let ms = self.expires_at.saturating_sub(self.asked_at);
        Duration::from_millis(ms.max(0).unsigned_abs())
    }

    /// Why this caller must not decide: it is the requester itself. `None` when it may.
    pub fn self_approval(&self, caller: &Caller) -> Option<&'static str> {
        if caller.session.as_ref() == Some(&self.session) {
            return Some("the call comes from the session that asked");
        }
        // Root has nothing but the kernel's word: for him it is the session that tells.
        let root = caller.proof == Proof::Local && caller.principal.is_administrator();
        (!root && caller.proof == self.asked_by.proof)
            .then_some("it was asked for with the same key or certificate")
    }
}

// === impl ApprovalState ===

impl ApprovalState {
    /// As it is written in answers.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Decided(decision) => decision.as_str(),
            Self::Expired => "expired",
        }
    }
}

// === impl ApprovalDecision ===

impl ApprovalDecision {
    /// As it is written in answers and records.
    pub fn as_str(&self) -> &'static str {
        if self.approved {
            "approved"
        } else {
            "rejected"
        }
    }
}

/// Refuses control and bidirectional characters, which could change what the deciding person sees.
fn check_text(text: &str, noun: &str, bytes_max: usize) -> Result<(), Error> {
    if text.len() > bytes_max {
        return Err(Error::invalid(format!(
            "an approval's {noun} must be at most {bytes_max} bytes: a person has to read it"
        )));
    }
    let hides = |c: char| {
        (c.is_control() && !matches!(c, '\n' | '\t'))
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if text.chars().any(hides) {
        return Err(Error::invalid(format!(
            "an approval's {noun} must be plain text: control characters could show a person something else"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tenants;

    fn asked_by(proof: Proof) -> Approval {
        Approval {
            id: ApprovalId::random(),
            session: "s".parse().unwrap(),
            owner: "user:ann".to_owned(),
            action: "rm -rf /".to_owned().try_into().unwrap(),
            asked_by: ApprovalParty {
                principal: "user:ann".to_owned(),
                proof,
            },
            asked_at: 0,
            expires_at: 1000,
            state: ApprovalState::Pending,
        }
    }

    fn caller(principal: Principal, proof: Proof, session: Option<&str>) -> Caller {
        Caller {
            principal,
            proof,
            session: session.map(|id| id.parse().unwrap()),
        }
    }

    fn key(id: &str) -> Proof {
        Proof::Key(id.parse().unwrap())
    }

    #[test]
    fn proofs_come_back() {
        for proof in [
            Proof::Local,
            key("key-a"),
            Proof::Certificate("a:b".to_owned()),
        ] {
            assert_eq!(proof.to_string().parse::<Proof>().unwrap(), proof);
        }
        for bad in ["", "locals", "key:", "key:A/B", "other:x"] {
            assert!(bad.parse::<Proof>().is_err(), "{bad}");
        }
    }

    #[test]
    fn nobody_approves_what_he_asked_for() {
        let ann = Principal::user(&"ann".parse().unwrap(), KeyId::random(), Tenants::any());
        let by_key = asked_by(key("key-a"));
        assert!(
            by_key
                .self_approval(&caller(ann.clone(), key("key-a"), None))
                .is_some()
        );
        assert!(
            by_key
                .self_approval(&caller(ann.clone(), key("key-b"), None))
                .is_none()
        );
        assert!(
            by_key
                .self_approval(&caller(ann.clone(), key("key-b"), Some("s")))
                .is_some()
        );
        assert!(
            by_key
                .self_approval(&caller(ann, key("key-b"), Some("t")))
                .is_none()
        );
    }

    #[test]
    fn root_may_unless_it_is_the_session() {
        let locally = asked_by(Proof::Local);
        let root = |session| caller(Principal::local(), Proof::Local, session);
        assert!(locally.self_approval(&root(None)).is_none());
        assert!(locally.self_approval(&root(Some("s"))).is_some());
        // Over TCP root is not told from a program of root's that passes things on.
        let loopback = caller(Principal::loopback(), Proof::Local, None);
        assert!(locally.self_approval(&loopback).is_some());
    }

    #[test]
    fn what_is_shown_is_what_it_is() {
        let action = |text: &str| ApprovalAction::try_from(text.to_owned());
        assert!(action("drop table users;\n\tand then é").is_ok());
        assert!(action(&"x".repeat(ACTION_BYTES_MAX)).is_ok());
        for bad in [
            "",
            " \n",
            "a\x1b[2Kb",
            "a\rb",
            "a\0",
            "a\u{202e}b",
            "a\u{9b}b",
        ] {
            assert!(action(bad).is_err(), "{bad:?}");
        }
        assert!(action(&"x".repeat(ACTION_BYTES_MAX + 1)).is_err());
        let reason = |text: &str| ApprovalReason::try_from(text.to_owned());
        assert!(reason("").is_ok() && reason("a\x07").is_err());
        assert!(reason(&"x".repeat(REASON_BYTES_MAX + 1)).is_err());
    }

    #[test]
    fn times_are_bounded() {
        let time = |ms| ApprovalTime::from_ms(ms).map(ApprovalTime::as_duration);
        assert_eq!(time(0).unwrap(), OPEN_DEFAULT);
        assert_eq!(time(1).unwrap(), Duration::from_millis(1));
        assert_eq!(time(86_400_000).unwrap(), OPEN_MAX);
        assert!(time(86_400_001).is_err() && time(u64::MAX).is_err());
    }
}
