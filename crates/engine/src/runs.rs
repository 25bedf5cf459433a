//! Commands that outlive the call that started them.
//!
//! The sandbox's guest keeps such a run and the beginning of what it writes; the server does not,
//! so that a thousand of them cost it nothing. For each there is a *keeper* here: a task that
//! follows the run, writes the transcript, and when the run is over moves what the guest kept to
//! the store. A server that stops or crashes leaves the run to its guest, and the next one follows
//! it again.
//!
//! # Guarantees
//! - Only running ones are counted against a session's bound.
//! - A run is in the store before it starts, and its guest forgets it only after its end is there.
//! - A run that is under way keeps its session from being idle.

mod keep;
mod start;
mod watch;

pub use start::BackgroundStarted;
pub use watch::{RunWatch, RunWatchEvent};

use crate::live::Live;
use crate::recorder::now_ms;
use crate::sessions::Shared;
use crate::{Error, Sessions};
use k8e_model::{BackgroundRun, BackgroundStatus, Principal, RunId, Session, SessionId};
use k8e_wire::proto::{EndRun, request};
use serde_json::json;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch as channel;
use tokio::time::timeout;

/// After a guest says that it ended a run: what its keeper takes to write that down, generously.
const END_WITHIN: Duration = Duration::from_secs(10);

/// How often a run is looked for while it moves from the guest to the store.
const MOVE_TRIES: usize = 3;

/// Runs that are not over, or not written down yet.
#[derive(Default)]
pub(crate) struct Background(Mutex<HashMap<RunId, Arc<Kept>>>);

/// A run that is not over, or not written down yet.
pub(crate) struct Kept {
    live: Arc<Live>,
    /// Without what it wrote, until it is over.
    record: Mutex<BackgroundRun>,
    /// Somebody wants it to end.
    cancelled: AtomicBool,
    over: channel::Sender<bool>,
}

// === impl Sessions ===

impl Sessions {
    /// A background run and what it wrote so far, also for a while after its session ended.
    pub async fn poll_run(&self, who: &Principal, id: &RunId) -> Result<BackgroundRun, Error> {
        for _ in 0..MOVE_TRIES {
            let Some(kept) = self.shared.background.find(who, id) else {
                return self.recorded_run(who, id).await;
            };
            if kept.is_over() {
                return Ok(kept.view());
            }
            kept.live.check_awake()?;
            let mut run = kept.view();
            match watch::read_so_far(&self.shared, &kept).await {
                Ok((stdout, stderr)) => {
                    (run.stdout, run.stderr) = (stdout.bytes, stderr.bytes);
                    (run.stdout_truncated, run.stderr_truncated) = (stdout.full, stderr.full);
                    return Ok(run);
                }
                // It is over: its keeper is about to say so.
                Err(_) if kept.over_soon().await => {}
                Err(error) => return Err(error),
            }
        }
        self.recorded_run(who, id).await
    }

    /// The background runs of a session without what they wrote, the newest first.
    pub async fn list_runs(
        &self,
        who: &Principal,
        session: &SessionId,
    ) -> Result<Vec<BackgroundRun>, Error> {
        self.owned(who, session).await?;
        let mut runs = self.shared.store.runs(session).await?;
        for run in &mut runs {
            if run.status != BackgroundStatus::Running {
                continue;
            }
            if let Some(kept) = self.shared.background.find(who, &run.id) {
                *run = kept.view().without_output();
            } else if let Ok(ended) = self.recorded_run(who, &run.id).await {
                // It ended after the store was read.
                *run = ended.without_output();
            }
        }
        Ok(runs)
    }

    /// Ends a background run and everything it started. One that is over stays as it ended.
    pub async fn cancel_run(&self, who: &Principal, id: &RunId) -> Result<BackgroundRun, Error> {
        let audit = self.audited(who, "run.cancel", id.as_str());
        audit.end(self.cancel_run_of(who, id).await)
    }

    async fn cancel_run_of(&self, who: &Principal, id: &RunId) -> Result<BackgroundRun, Error> {
        let Some(kept) = self.shared.background.find(who, id) else {
            return self.recorded_run(who, id).await;
        };
        kept.live.check_awake()?;
        kept.cancelled.store(true, Ordering::Relaxed);
        let end = request::Call::EndRun(EndRun { id: id.to_string() });
        let ended = async {
            let session = &kept.live.record.id;
            let what = format!("cancel run {id}");
            self.call(who, session, end, what).await?.reply().await
        };
        match ended.await {
            Ok(_) => {}
            // It ended by itself, or its session did.
            Err(_) if kept.over_soon().await => {}
            Err(error) => return Err(error),
        }
        kept.over_soon().await;
        self.poll_run(who, id).await
    }

    async fn recorded_run(&self, who: &Principal, id: &RunId) -> Result<BackgroundRun, Error> {
        let owner = (!who.is_operator()).then(|| who.name());
        let run = self.shared.store.run(id, owner).await?;
        run.ok_or_else(|| Error::RunNotFound(id.clone()))
    }
}

// === impl Background ===

impl Background {
    /// One of the caller's.
    fn find(&self, who: &Principal, id: &RunId) -> Option<Arc<Kept>> {
        let kept = self.map().get(id).cloned();
        kept.filter(|kept| who.may_use(&kept.live.record.owner))
    }

    fn add(&self, live: Arc<Live>, record: BackgroundRun) -> Arc<Kept> {
        let id = record.id.clone();
        let kept = Arc::new(Kept {
            live,
            record: Mutex::new(record),
            cancelled: AtomicBool::new(false),
            over: channel::Sender::new(false),
        });
        self.map().insert(id, Arc::clone(&kept));
        kept
    }

    /// Those of a session.
    pub(crate) fn of(&self, live: &Arc<Live>) -> Vec<RunId> {
        let runs = self.map();
        let own = runs
            .iter()
            .filter(|(_, kept)| Arc::ptr_eq(&kept.live, live));
        own.map(|(id, _)| id.clone()).collect()
    }

    fn remove(&self, id: &RunId) {
        self.map().remove(id);
    }

    fn map(&self) -> MutexGuard<'_, HashMap<RunId, Arc<Kept>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Kept ===

impl Kept {
    pub(crate) fn id(&self) -> RunId {
        self.record().id.clone()
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    /// Waits a while for it to be over.
    async fn over_soon(&self) -> bool {
        let mut over = self.over.subscribe();
        let over = over.wait_for(|over| *over);
        timeout(END_WITHIN, over).await.is_ok()
    }

    /// As it is now.
    fn view(&self) -> BackgroundRun {
        let mut run = self.record().clone();
        if run.status == BackgroundStatus::Running {
            let ms = now_ms().saturating_sub(run.started_at).max(0);
            run.duration = Duration::from_millis(ms.unsigned_abs());
        }
        run
    }

    fn record(&self) -> MutexGuard<'_, BackgroundRun> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Shared ===

impl Shared {
    /// A run that ended with its session while nobody followed it.
    async fn lose_run(&self, mut run: BackgroundRun, reason: String) {
        run.status = BackgroundStatus::Lost;
        run.exit_code = keep::EXIT_UNKNOWN;
        run.reason = reason;
        run.ended_at = Some(now_ms());
        if let Err(error) = self.store.finish_run(&run).await {
            tracing::warn!(run = %run.id, %error, "a run cannot be written down");
        }
        if let Ok(Some(session)) = self.store.session(&run.session).await {
            self.record_lost(&session, &run.id, &run.reason);
        }
    }

    /// The `run_ended` of a background run whose end nobody saw.
    fn record_lost(&self, session: &Session, run: &RunId, reason: &str) {
        let detail = json!({ "status": "lost", "error": reason, "run_id": run.as_str() });
        self.recorder.event(session, "run_ended", detail);
    }
}
