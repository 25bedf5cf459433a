//! Approvals: an agent asks a person before it does something that cannot be undone.

use crate::{ApprovalId, Error, KeyId, Principal, SessionId, UnixMillis};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A person has to read it: a page of text.
const ACTION_BYTES_MAX: usize = 4 * 1024;

/// A few sentences.
const REASON_BYTES_MAX: usize = 1024;

/// K8E's number.
const OPEN_DEFAULT: Duration = Duration::from_secs(5 * 60);

/// A person sleeps over it once; after that what was asked may mean something else.
const OPEN_MAX: Duration = Duration::from_secs(24 * 3600);

/// What a caller proved himself with, as far as it matters whether two calls had the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Proof {
    /// The kernel's word, on this machine.
    Local,
    /// An API key, or a certificate that was given for it: who has the key has those.
    Key(KeyId),
    /// A certificate that the server made by itself, by its common name: it is made again.
    Certificate(String),
}

/// Who calls, with what, and from where as far as he says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Who.
    pub principal: Principal,
    /// What he proved that with.
    pub proof: Proof,
    /// The session that he says he works for.
    pub session: Option<SessionId>,
}

/// What somebody wants to do, for a person to read: it shows as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalAction(String);

/// Why somebody decided as he did; may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApprovalReason(String);

/// How long an approval can be decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApprovalTime(Duration);

/// A question that a person has to answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Approval {
    /// Random.
    pub id: ApprovalId,
    /// Whose work waits.
    pub session: SessionId,
    /// Of the session.
    pub owner: String,
    /// What is to be done.
    pub action: ApprovalAction,
    /// Who asked.
    pub asked_by: ApprovalParty,
    /// When.
    pub asked_at: UnixMillis,
    /// From then on nobody can decide.
    pub expires_at: UnixMillis,
    /// What became of it.
    pub state: ApprovalState,
}

/// Somebody who asked or decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalParty {
    /// The principal's name.
    pub principal: String,
    /// With what.
    pub proof: Proof,
}

/// What became of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApprovalState {
    /// Nobody has decided yet.
    Pending,
    /// Somebody has.
    Decided(Box<ApprovalDecision>),
    /// Nobody did in time, or its session is over.
    Expired,
}

/// An answer. There is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalDecision {
    /// Yes or no.
    pub approved: bool,
    /// Why, in the decider's words.
    pub reason: ApprovalReason,
    /// Whose answer it is.
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
    /// As he is written down.
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
    /// What a request asks for; 0 is the default.
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
    /// How long it could be decided.
    pub fn open_for(&self) -> Duration {
        let ms = self.expires_at.saturating_sub(self.asked_at);
        Duration::from_millis(ms.max(0).unsigned_abs())
    }

    /// What speaks against this caller's decision, whoever he is: it would be the asker's own.
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

/// A person decides by what he sees: nothing may move his cursor or turn his text around.
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
