//! Approvals (human in the loop): an agent requests one, a person decides, and the agent's call waits for the decision.
//!
//! The store is the source of truth: a request is stored before its id is returned, a decision before a
//! waiter is woken. Memory holds only the waiters; after a restart a client waits again and finds
//! the stored decision.

use crate::live::{Live, Purpose, left_active};
use crate::recorder::now_ms;
use crate::sessions::Shared;
use crate::{Error, Sessions};
use k8e_model::{
    Approval, ApprovalAction, ApprovalDecision, ApprovalId, ApprovalReason, ApprovalState,
    ApprovalTime, Caller, Principal, SessionId,
};
use k8e_store::ApprovalQuery;
use serde_json::json;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep;

/// Pending approvals per session: more than a person wants to see.
const PENDING_MAX: usize = 64;

/// Bytes of an action in an event, which is cut there: a session has a thousand events. The approval has all of it.
const EVENT_ACTION_BYTES_MAX: usize = 512;

/// Added to the time until an approval's deadline, so that the deadline has passed when the wait ends.
const PAST_THE_END: Duration = Duration::from_millis(5);

/// Filter of a list of approvals.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApprovalFilter {
    /// Session to match; none matches any.
    pub session: Option<SessionId>,
    /// Include decided and expired ones.
    pub all: bool,
}

/// Waiters by approval.
#[derive(Default)]
pub(crate) struct Approvals {
    // Held for map operations only, never across an await.
    waiting: Mutex<HashMap<ApprovalId, watch::Sender<()>>>,
}

/// A call that waits for a decision; unregistered on drop.
struct Waiter<'a> {
    approvals: &'a Approvals,
    id: ApprovalId,
    /// None only during drop.
    answered: Option<watch::Receiver<()>>,
}

// === impl Sessions ===

impl Sessions {
    /// Requests an approval. It is stored when this returns.
    pub async fn request_approval(
        &self,
        caller: &Caller,
        session: &SessionId,
        action: ApprovalAction,
        time: ApprovalTime,
    ) -> Result<Approval, Error> {
        let who = &caller.principal;
        let mut audit = self.audited(who, "approval.request", session.as_str());
        let asked = self.ask(caller, session, action, time).await;
        if let Ok(approval) = &asked {
            audit.about(&format!("{} {session}", approval.id));
        }
        audit.end(asked)
    }

    async fn ask(
        &self,
        caller: &Caller,
        session: &SessionId,
        action: ApprovalAction,
        time: ApprovalTime,
    ) -> Result<Approval, Error> {
        let live = self.live(&caller.principal, session).await?;
        // A request counts as a use of the session.
        let _used = live.begin(Purpose::Wait, 0, &self.shared.recorder)?;
        let now = now_ms();
        let open_ms = i64::try_from(time.as_duration().as_millis()).unwrap_or(i64::MAX);
        let approval = Approval {
            id: ApprovalId::random(),
            session: session.clone(),
            owner: live.record.owner.clone(),
            action,
            asked_by: caller.party(),
            asked_at: now,
            expires_at: now.saturating_add(open_ms),
            state: ApprovalState::Pending,
        };
        let store = &self.shared.store;
        if !store.insert_approval(&approval, PENDING_MAX).await? {
            return Err(Error::SessionBusy {
                id: session.clone(),
                what: "approvals",
                max: PENDING_MAX,
            });
        }
        self.shared.record_asked(&live, &approval);
        Ok(approval)
    }

    /// Waits until an approval is decided. Dropping this only ends the wait.
    ///
    /// Errors: `ApprovalTimedOut` when its deadline passed, `SessionEnded` when its session ended first.
    pub async fn wait_approval(&self, who: &Principal, id: &ApprovalId) -> Result<Approval, Error> {
        // Subscribed first, so that no decision is missed between the lookup and the wait.
        let mut waiter = self.shared.approvals.wait(id);
        loop {
            let approval = self.approval(who, id).await?;
            let live = match approval.state {
                ApprovalState::Pending => self.shared.find_any(&approval.session),
                ApprovalState::Decided(_) | ApprovalState::Expired => None,
            };
            let Some(live) = live else {
                return self.outcome(approval).await;
            };
            let _used = live.begin(Purpose::Wait, 0, &self.shared.recorder)?;
            let left_ms = approval.expires_at.saturating_sub(now_ms());
            let left = Duration::from_millis(left_ms.max(0).unsigned_abs()) + PAST_THE_END;
            let mut phases = live.phases();
            tokio::select! {
                () = waiter.answered() => {}
                () = sleep(left) => {}
                () = left_active(&mut phases) => {}
                () = self.shared.stopped() => return Err(Error::Stopping),
            }
        }
    }

    /// Decides an approval; a decision is final.
    ///
    /// Guarantees: a decision that was begun is finished, also when the returned future is dropped.
    pub async fn decide_approval(
        &self,
        caller: &Caller,
        id: &ApprovalId,
        approved: bool,
        reason: ApprovalReason,
    ) -> Result<Approval, Error> {
        let audit = self.audited(&caller.principal, "approval.decide", id.as_str());
        audit.end(self.decide(caller, id, approved, reason).await)
    }

    async fn decide(
        &self,
        caller: &Caller,
        id: &ApprovalId,
        approved: bool,
        reason: ApprovalReason,
    ) -> Result<Approval, Error> {
        // The operator may decide for every owner: it can use their sessions anyway.
        let approval = self.approval(&caller.principal, id).await?;
        if let Some(why) = approval.self_approval(caller) {
            let id = id.clone();
            return Err(Error::SelfApproval { id, why });
        }
        check_open(&approval)?;
        let decision = ApprovalDecision {
            approved,
            reason,
            by: caller.party(),
            at: now_ms(),
        };
        let Ok(work) = Arc::clone(&self.shared.work).try_read_owned() else {
            return Err(Error::Stopping);
        };
        let shared = Arc::clone(&self.shared);
        let deciding = self.shared.runtime.spawn(async move {
            let _work = work;
            shared.write_decision(approval, decision).await
        });
        deciding.await.unwrap_or(Err(Error::Stopping))
    }

    /// The caller's approvals, the oldest first: pending ones, and with `all` decided and expired ones.
    pub async fn list_approvals(
        &self,
        who: &Principal,
        filter: &ApprovalFilter,
    ) -> Result<Vec<Approval>, Error> {
        if let Some(session) = &filter.session {
            self.owned(who, session).await?;
        }
        let query = ApprovalQuery {
            owner: (!who.is_operator()).then(|| who.name().to_owned()),
            session: filter.session.clone(),
            all: filter.all,
        };
        Ok(self.shared.store.approvals(&query, now_ms()).await?)
    }

    async fn approval(&self, who: &Principal, id: &ApprovalId) -> Result<Approval, Error> {
        let owner = (!who.is_operator()).then(|| who.name());
        let found = self.shared.store.approval(id, owner, now_ms()).await?;
        found.ok_or_else(|| Error::ApprovalNotFound(id.clone()))
    }

    /// Result of a wait: the decision, or why there is none.
    async fn outcome(&self, approval: Approval) -> Result<Approval, Error> {
        if matches!(approval.state, ApprovalState::Decided(_)) {
            return Ok(approval);
        }
        if approval.expires_at <= now_ms() {
            return Err(Error::ApprovalTimedOut(approval.open_for()));
        }
        let id = approval.session;
        let reason = match self.shared.find_any(&id) {
            Some(live) => live.reason(),
            None => {
                let record = self.shared.store.session(&id).await?;
                record.map(|record| record.reason).unwrap_or_default()
            }
        };
        Err(Error::SessionEnded { id, reason })
    }
}

// === impl Shared ===

impl Shared {
    fn record_asked(&self, live: &Live, approval: &Approval) {
        let action = approval.action.as_str();
        let event = json!({
            "approval_id": approval.id.as_str(),
            "action": &action[..action.floor_char_boundary(EVENT_ACTION_BYTES_MAX)],
            "asked_by": approval.asked_by.principal,
            "expires_at_unix_ms": approval.expires_at,
        });
        self.recorder.event(&live.record, "approval_asked", event);
    }

    async fn write_decision(
        &self,
        mut approval: Approval,
        decision: ApprovalDecision,
    ) -> Result<Approval, Error> {
        if !self.store.decide_approval(&approval.id, &decision).await? {
            // Decided concurrently, or its deadline or its session ended meanwhile.
            let now = self.store.approval(&approval.id, None, now_ms()).await?;
            let now = now.ok_or_else(|| Error::ApprovalNotFound(approval.id.clone()))?;
            check_open(&now)?;
            return Err(Error::ApprovalExpired(approval.id));
        }
        if let Some(live) = self.find_any(&approval.session) {
            let event = json!({
                "approval_id": approval.id.as_str(),
                "approved": decision.approved,
                "decided_by": decision.by.principal,
                "reason": decision.reason.as_str(),
            });
            self.recorder.event(&live.record, "approval_decided", event);
        }
        self.approvals.answer(&approval.id);
        approval.state = ApprovalState::Decided(Box::new(decision));
        Ok(approval)
    }
}

// === impl Approvals ===

impl Approvals {
    fn wait(&self, id: &ApprovalId) -> Waiter<'_> {
        let answered = self.waiting().entry(id.clone()).or_default().subscribe();
        Waiter {
            approvals: self,
            id: id.clone(),
            answered: Some(answered),
        }
    }

    fn answer(&self, id: &ApprovalId) {
        if let Some(waiters) = self.waiting().get(id) {
            waiters.send_replace(());
        }
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<ApprovalId, watch::Sender<()>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Waiter ===

impl Waiter<'_> {
    async fn answered(&mut self) {
        if let Some(answered) = &mut self.answered {
            // The sender lives as long as its waiters.
            answered.changed().await.ok();
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut waiting = self.approvals.waiting();
        self.answered = None;
        let last = |waiters: &watch::Sender<()>| waiters.receiver_count() == 0;
        if waiting.get(&self.id).is_some_and(last) {
            waiting.remove(&self.id);
        }
    }
}

/// Checks that an approval is pending.
fn check_open(approval: &Approval) -> Result<(), Error> {
    let id = approval.id.clone();
    match &approval.state {
        ApprovalState::Pending => Ok(()),
        ApprovalState::Expired => Err(Error::ApprovalExpired(id)),
        ApprovalState::Decided(decision) => Err(Error::ApprovalDecided {
            id,
            decision: decision.as_str(),
            by: decision.by.principal.clone(),
        }),
    }
}

/// Duration in Go's format, which `sandbox.v1` clients match: `5m0s`, `30s`, `250ms`.
pub(crate) fn in_words(time: Duration) -> String {
    let (hours, minutes, seconds) = (
        time.as_secs() / 3600,
        time.as_secs() / 60 % 60,
        time.as_secs() % 60,
    );
    match (hours, minutes) {
        (0, 0) if seconds == 0 => format!("{}ms", time.as_millis()),
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m{seconds}s"),
        _ => format!("{hours}h{minutes}m{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_as_k8e_tells_them() {
        for (ms, told) in [
            (300_000, "5m0s"),
            (30_000, "30s"),
            (250, "250ms"),
            (86_400_000, "24h0m0s"),
            (61_000, "1m1s"),
        ] {
            assert_eq!(in_words(Duration::from_millis(ms)), told);
        }
    }
}
