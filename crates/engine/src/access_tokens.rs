//! Access tokens of sessions: whoever holds one uses that session in its owner's name, and nothing else.
//!
//! A token is derived (HMAC-SHA-256) from a key of the server and the ids of session and sandbox, so none is stored, it
//! is the same before and after a pause and a restart, and a later session of the same name has another.

use crate::{Error, Sessions};
use k8e_model::{ClientKind, Phase, Principal, Session, SessionId};
use k8e_store::Store;
use ring::hmac;

/// The key that tokens are derived with.
pub(crate) struct AccessTokens(hmac::Key);

// === impl AccessTokens ===

impl AccessTokens {
    pub(crate) async fn load(store: &Store) -> Result<Self, Error> {
        let key = store.token_key().await?;
        Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, &key)))
    }

    fn of(&self, session: &Session) -> String {
        let named = format!("session access\0{}\0{}", session.id, session.sandbox);
        let tag = hmac::sign(&self.0, named.as_bytes());
        tag.as_ref()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

// === impl Sessions ===

impl Sessions {
    /// The access token of a session that the caller may use.
    pub async fn access_token(&self, who: &Principal, id: &SessionId) -> Result<String, Error> {
        let live = self.live(who, id).await?;
        Ok(self.shared.access_tokens.of(&live.record))
    }

    /// The phase of a live session of a kind of client; none when there is no such session.
    pub fn live_phase(&self, id: &SessionId, client: &ClientKind) -> Option<Phase> {
        let live = self.shared.find_any(id)?;
        (live.record.client == *client).then(|| live.phase())
    }

    /// The owner of a live session.
    pub fn owner_of(&self, id: &SessionId) -> Option<String> {
        let live = self.shared.find_any(id)?;
        Some(live.record.owner.clone())
    }

    /// The principal that the holder of an access token acts as: the session's owner. None when the token is wrong, or
    /// there is no such session of that kind of client.
    pub fn verify_access_token(
        &self,
        id: &SessionId,
        client: &ClientKind,
        token: &str,
    ) -> Option<Principal> {
        self.verify_derived(id, client, |right| constant_time_eq(right, token))
    }

    /// The same, by something that the client made of the token. `is_right` gets the right token and must take the same
    /// time for every wrong answer.
    pub fn verify_derived(
        &self,
        id: &SessionId,
        client: &ClientKind,
        is_right: impl FnOnce(&str) -> bool,
    ) -> Option<Principal> {
        let live = self.shared.find_any(id)?;
        let right = self.shared.access_tokens.of(&live.record);
        let known = live.record.client == *client && is_right(&right);
        known.then(|| Principal::token_holder(&live.record.owner))
    }

    /// Searches the live sessions of a kind of client for the one whose token `is_right`: for signed URLs, which do not
    /// name a session.
    pub fn find_by_token(
        &self,
        client: &ClientKind,
        is_right: impl Fn(&str) -> bool,
    ) -> Option<(SessionId, Principal)> {
        let mut found = None;
        self.shared.each_live(|live| {
            let record = &live.record;
            if record.client == *client && is_right(&self.shared.access_tokens.of(record)) {
                found = Some((record.id.clone(), Principal::token_holder(&record.owner)));
            }
        });
        found
    }
}

/// Whether two texts are the same, in a time that depends on their lengths only.
fn constant_time_eq(a: &str, b: &str) -> bool {
    let differs = a.bytes().zip(b.bytes());
    let differs = differs.fold(0, |all, (a, b)| all | std::hint::black_box(a ^ b));
    a.len() == b.len() && differs == 0
}
