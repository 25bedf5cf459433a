//! Crash recovery: after a stop or a crash live sandboxes are adopted, ended sessions recorded, leftovers swept.

use super::Shared;
use super::create::HELLO_TIMEOUT;
use crate::Error;
use crate::error::chain;
use crate::live::{Live, left_active, within};
use crate::metrics;
use crate::recorder::now_ms;
use futures::StreamExt as _;
use k8e_driver::{GuestAddress, Sandbox};
use k8e_model::{Phase, SandboxId, Session, SessionOrigin};
use k8e_wire::WireError;
use serde_json::json;
use std::collections::HashSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Concurrent adoptions of sandboxes, and concurrent guest handshakes.
const ADOPTED_AT_ONCE: usize = 16;

/// Delay between attempts to connect to a guest whose connection queue is full.
const BUSY_PAUSE: Duration = Duration::from_millis(50);

// === impl Shared ===

impl Shared {
    /// Reconciles the index and the machine with the records, and ends records without a sandbox.
    ///
    /// Waits for drivers, not for guests, which are untrusted and must not delay the start of the
    /// server: guest handshakes run in the background.
    pub(super) async fn recover(self: &Arc<Self>) -> Result<(), Error> {
        let records = self.store.unended_sessions(now_ms()).await?;
        self.record_lost_runs(&records).await?;
        let (children, records): (Vec<_>, Vec<_>) = records
            .into_iter()
            .partition(|record| record.sub_agent.is_some());
        let found = futures::stream::iter(records)
            .map(|record| self.recover_one(record))
            .buffer_unordered(ADOPTED_AT_ONCE);
        let results: Vec<Result<Option<Arc<Live>>, Error>> = found.collect().await;
        let adopted: Vec<Arc<Live>> = results
            .into_iter()
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?;
        let keep: HashSet<SandboxId> = adopted
            .iter()
            .map(|live| live.record.sandbox.clone())
            .collect();
        self.sweep(&keep).await;
        for child in children {
            self.recover_sub_agent(child).await?;
        }
        // A paused guest does not answer.
        let awake = adopted
            .into_iter()
            .filter(|live| live.phase() != Phase::Paused)
            .collect();
        self.runtime.spawn(greet_all(Arc::clone(self), awake));
        Ok(())
    }

    /// Foreground runs end with the server: records the end of those that a killed server could not record.
    async fn record_lost_runs(&self, records: &[Session]) -> Result<(), Error> {
        let lost = self.store.unended_foreground_runs().await?;
        for record in records {
            for _ in 0..lost.get(&record.id).copied().unwrap_or(0) {
                let detail =
                    json!({ "status": "lost", "error": "the server was killed while it ran" });
                self.recorder.event(record, "run_ended", detail);
            }
        }
        Ok(())
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) {
        for driver in &self.drivers {
            match driver.sweep(keep).await {
                Ok(swept) if swept.is_empty() => {}
                Ok(swept) => {
                    tracing::info!(runtime = %driver.kind(), sandboxes = swept.len(), "sweep: removed leftover sandboxes")
                }
                Err(e) => {
                    tracing::warn!(runtime = %driver.kind(), error = chain(&e), "sweep: leftover sandboxes cannot be removed")
                }
            }
        }
    }

    /// Adopts a session's sandbox; none when the session has ended.
    async fn recover_one(
        self: &Arc<Self>,
        mut record: Session,
    ) -> Result<Option<Arc<Live>>, Error> {
        let id = record.id.clone();
        match self.try_adopt(&record).await {
            Ok((sandbox, phase)) => {
                record.phase = phase;
                let live = Arc::new(Live::new(record));
                live.set_sandbox(sandbox);
                let saved = live.sandbox().is_some_and(|sandbox| sandbox.is_saved());
                let applied = match saved {
                    // It gets a gate when it is restored.
                    true => Ok(()),
                    false => self.apply_egress(&live, &live.record.egress).await,
                };
                self.index().sessions.insert(id, Arc::clone(&live));
                self.recorder.event(&live.record, "recovered", json!({}));
                metrics::recovered(live.record.runtime);
                self.publish(&live);
                if let Err(error) = applied {
                    let reason = format!(
                        "its egress policy could not be enforced when the server came back: {}",
                        chain(&error)
                    );
                    self.end(&live, "ended", &reason);
                    return Ok(None);
                }
                Ok(Some(live))
            }
            Err(reason) => {
                self.record_end(&record, &reason).await?;
                Ok(None)
            }
        }
    }

    /// Recovers a sub-agent with its parent, in the parent's phase.
    async fn recover_sub_agent(self: &Arc<Self>, mut record: Session) -> Result<(), Error> {
        let parent = record.sub_agent.as_ref().map(|sub| &sub.parent);
        let parent = parent.and_then(|parent| self.find_any(parent));
        let Some(parent) = parent.filter(|parent| {
            parent.record.owner == record.owner
                && parent.parent().is_none()
                && !parent.phase().is_ending()
        }) else {
            return self
                .record_end(&record, "its parent was gone when the server came back")
                .await;
        };
        let was = std::mem::replace(&mut record.phase, parent.phase());
        let live = Arc::new(Live::new_child(record, &parent));
        parent.restore_sub_agent(&live);
        let id = live.record.id.clone();
        self.index().sessions.insert(id, Arc::clone(&live));
        self.recorder.event(&live.record, "recovered", json!({}));
        metrics::recovered(live.record.runtime);
        self.publish(&live);
        if was.is_ending() {
            // Its processes may still run.
            let reason = "the server stopped while it was being removed";
            self.end(&live, "ended", reason);
        }
        Ok(())
    }

    /// Records the end of a session that could not be recovered.
    async fn record_end(&self, record: &Session, reason: &str) -> Result<(), Error> {
        self.store
            .set_phase(&record.id, Phase::Ended, reason, now_ms())
            .await?;
        self.recorder
            .event(record, "ended", json!({ "reason": reason }));
        metrics::ended(record.runtime, "ended");
        Ok(())
    }

    /// Adopts the sandbox; returns it with its phase, or the reason why the session ends.
    async fn try_adopt(&self, record: &Session) -> Result<(Arc<dyn Sandbox>, Phase), String> {
        match record.phase {
            Phase::Creating => return Err("the server stopped while it was being made".to_owned()),
            Phase::Terminating | Phase::Ended => {
                return Err("the server stopped while it was being removed".to_owned());
            }
            Phase::Active | Phase::Paused => {}
        }
        if record.origin == SessionOrigin::FreshRun {
            return Err("the server stopped during the run that it was made for".to_owned());
        }
        let Some(driver) = self.driver(record.runtime) else {
            return Err(format!(
                "the server came back without its runtime {}",
                record.runtime
            ));
        };
        match driver.adopt(&record.sandbox, &record.limits).await {
            Ok(Some(sandbox)) => {
                let phase = self.reconcile(&record.id, record.phase, &*sandbox).await?;
                Ok((sandbox.into(), phase))
            }
            Ok(None) => Err("the sandbox was gone when the server came back".to_owned()),
            Err(e) => Err(format!(
                "the sandbox could not be adopted when the server came back: {}",
                chain(&e)
            )),
        }
    }

    /// Guest handshake after adoption: ends a session whose guest does not answer. Until then the
    /// session can be used, and calls fail with their own timeout.
    async fn greet(self: &Arc<Self>, live: Arc<Live>) {
        let Some(sandbox) = live.sandbox() else {
            return;
        };
        let mut phases = live.phases();
        let (paused, mut left) = (phases.clone(), HELLO_TIMEOUT);
        let answer = tokio::select! {
            () = left_active(&mut phases) => return,
            answer = within(&paused, &mut left, hello(sandbox.guest())) => answer,
        };
        if !matches!(answer, Some(Ok(()))) {
            let reason = "its agent did not answer when the server came back";
            self.end(&live, "ended", reason);
        }
    }
}

/// Handshake with retries: a guest that is in use already may have a full connection queue.
async fn hello(guest: &GuestAddress) -> Result<(), WireError> {
    loop {
        match guest.hello().await {
            Err(WireError::Io(e)) if e.kind() == ErrorKind::WouldBlock => sleep(BUSY_PAUSE).await,
            answer => return answer,
        }
    }
}

/// Handshakes with all adopted guests, in the background; one that hangs delays only other handshakes.
async fn greet_all(shared: Arc<Shared>, adopted: Vec<Arc<Live>>) {
    let greeted = futures::stream::iter(adopted)
        .for_each_concurrent(ADOPTED_AT_ONCE, |live| shared.greet(live));
    tokio::select! {
        () = greeted => {}
        () = shared.stopped() => {}
    }
}
