//! History of a session: transcript and events, also after it ended, for the retention time.

use crate::{Error, Sessions};
use k8e_model::{Principal, SessionId};
use k8e_store::{EventPage, TranscriptPage};

// === impl Sessions ===

impl Sessions {
    /// Transcript: output of the session's commands from `offset`, at most `limit` bytes; limit 0 is the default.
    pub async fn transcript(
        &self,
        who: &Principal,
        id: &SessionId,
        offset: u64,
        limit: u64,
    ) -> Result<TranscriptPage, Error> {
        let sandbox = self.owned(who, id).await?;
        self.shared.recorder.flush().await;
        Ok(self
            .shared
            .store
            .transcript(&sandbox, offset, limit)
            .await?)
    }

    /// The session's events after number `after`, at most `limit`; limit 0 is the default.
    pub async fn events(
        &self,
        who: &Principal,
        id: &SessionId,
        after: u64,
        limit: u32,
    ) -> Result<EventPage, Error> {
        self.owned(who, id).await?;
        self.shared.recorder.flush().await;
        Ok(self.shared.store.events(id, after, limit).await?)
    }
}
