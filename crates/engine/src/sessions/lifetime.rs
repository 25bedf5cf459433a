//! Changes of a live session's TTL.

use super::Sessions;
use crate::{Error, SessionView};
use k8e_model::{Principal, SessionId};
use serde_json::json;
use std::time::Duration;
use tokio::time::Instant;

// === impl Sessions ===

impl Sessions {
    /// Sets the end of a session's TTL to `after` from now, sooner or later than before; none is never.
    ///
    /// Flow: store → memory → expiry queue. After a crash between them, recovery uses the stored one.
    pub async fn set_ttl(
        &self,
        who: &Principal,
        id: &SessionId,
        after: Option<Duration>,
    ) -> Result<SessionView, Error> {
        let audit = self.audited(who, "session.set_ttl", id.as_str());
        audit.end(self.change_ttl(who, id, after).await)
    }

    async fn change_ttl(
        &self,
        who: &Principal,
        id: &SessionId,
        after: Option<Duration>,
    ) -> Result<SessionView, Error> {
        let live = self.live(who, id).await?;
        let lifetime = live.lifetime_until(after);
        if !self.shared.store.set_lifetime(id, lifetime).await? {
            return Err(live.gone());
        }
        {
            let mut index = self.shared.index();
            live.set_lifetime(lifetime, after);
            match live.ends_at(Instant::now()) {
                // One that is ending is in no queue.
                Some(at) if !live.phase().is_ending() => index.schedule(&live, at),
                _ => index.unschedule(&live),
            }
        }
        self.shared.expiry.notify_one();
        let detail = json!({ "ttl_s": after.map(|after| after.as_secs()) });
        self.shared
            .recorder
            .event(&live.record, "ttl_changed", detail);
        Ok(self.view(&live))
    }
}
