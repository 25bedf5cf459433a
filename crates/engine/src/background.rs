//! Background runs: commands that outlive the call that started them.
//!
//! The sandbox's guest keeps such a run and the beginning of its output; the server does not buffer it,
//! so that a thousand of them cost it little. For each there is a *follower* task here, which
//! writes the transcript and, when the run has ended, moves the output that the guest kept to
//! the store. A server that stops or crashes leaves the run to its guest, and the next one attaches to
//! it again (crash recovery).
//!
//! # Guarantees
//! - Only running ones count against a session's limit.
//! - A run is in the store before it starts, and its guest forgets it only after its end is there.
//! - A session with a running one is not idle.

mod follow;
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

/// Time that the follower gets to store a run's end after the guest reported it; far more than it needs.
const END_WITHIN: Duration = Duration::from_secs(10);

/// Lookup attempts of a run while it moves from the guest to the store.
const MOVE_TRIES: usize = 3;

/// Registry of background runs that are running, or whose end is not stored yet.
#[derive(Default)]
pub(crate) struct Background(Mutex<HashMap<RunId, Arc<TrackedRun>>>);

/// A background run that is running, or whose end is not stored yet.
pub(crate) struct TrackedRun {
    live: Arc<Live>,
    /// Its record; output is filled in when the run has ended.
    record: Mutex<BackgroundRun>,
    /// Cancellation was requested.
    cancelled: AtomicBool,
    over: channel::Sender<bool>,
}

// === impl Sessions ===

impl Sessions {
    /// A background run and its output so far; also after its session ended, for the retention time.
    pub async fn poll_run(&self, who: &Principal, id: &RunId) -> Result<BackgroundRun, Error> {
        for _ in 0..MOVE_TRIES {
            let Some(tracked) = self.shared.background.find(who, id) else {
                return self.recorded_run(who, id).await;
            };
            if tracked.is_over() {
                return Ok(tracked.view());
            }
            tracked.live.check_awake()?;
            let mut run = tracked.view();
            match watch::read_so_far(&self.shared, &tracked).await {
                Ok((stdout, stderr)) => {
                    (run.stdout, run.stderr) = (stdout.bytes, stderr.bytes);
                    (run.stdout_truncated, run.stderr_truncated) = (stdout.full, stderr.full);
                    return Ok(run);
                }
                // It has ended: the follower is about to store that.
                Err(_) if tracked.over_soon().await => {}
                Err(error) => return Err(error),
            }
        }
        self.recorded_run(who, id).await
    }

    /// The background runs of a session without their output, the newest first.
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
            if let Some(tracked) = self.shared.background.find(who, &run.id) {
                *run = tracked.view().without_output();
            } else if let Ok(ended) = self.recorded_run(who, &run.id).await {
                // It ended after the store was read.
                *run = ended.without_output();
            }
        }
        Ok(runs)
    }

    /// Kills a background run and everything it started. No-op for one that has ended.
    pub async fn cancel_run(&self, who: &Principal, id: &RunId) -> Result<BackgroundRun, Error> {
        let audit = self.audited(who, "run.cancel", id.as_str());
        audit.end(self.cancel_run_of(who, id).await)
    }

    async fn cancel_run_of(&self, who: &Principal, id: &RunId) -> Result<BackgroundRun, Error> {
        let Some(tracked) = self.shared.background.find(who, id) else {
            return self.recorded_run(who, id).await;
        };
        tracked.live.check_awake()?;
        tracked.cancelled.store(true, Ordering::Relaxed);
        let end = request::Call::EndRun(EndRun { id: id.to_string() });
        let ended = async {
            let session = &tracked.live.record.id;
            let what = format!("cancel run {id}");
            self.call(who, session, end, what).await?.reply().await
        };
        match ended.await {
            Ok(_) => {}
            // It ended by itself, or its session did.
            Err(_) if tracked.over_soon().await => {}
            Err(error) => return Err(error),
        }
        tracked.over_soon().await;
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
    /// Looks up one of the caller's runs.
    fn find(&self, who: &Principal, id: &RunId) -> Option<Arc<TrackedRun>> {
        let tracked = self.map().get(id).cloned();
        tracked.filter(|tracked| who.may_use(&tracked.live.record.owner))
    }

    fn add(&self, live: Arc<Live>, record: BackgroundRun) -> Arc<TrackedRun> {
        let id = record.id.clone();
        let tracked = Arc::new(TrackedRun {
            live,
            record: Mutex::new(record),
            cancelled: AtomicBool::new(false),
            over: channel::Sender::new(false),
        });
        self.map().insert(id, Arc::clone(&tracked));
        tracked
    }

    /// Ids of the runs of a session.
    pub(crate) fn of(&self, live: &Arc<Live>) -> Vec<RunId> {
        let runs = self.map();
        let own = runs
            .iter()
            .filter(|(_, tracked)| Arc::ptr_eq(&tracked.live, live));
        own.map(|(id, _)| id.clone()).collect()
    }

    fn remove(&self, id: &RunId) {
        self.map().remove(id);
    }

    fn map(&self) -> MutexGuard<'_, HashMap<RunId, Arc<TrackedRun>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Kept ===

impl TrackedRun {
    pub(crate) fn id(&self) -> RunId {
        self.record().id.clone()
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    /// Waits up to `END_WITHIN` for the end; false when it did not come.
    async fn over_soon(&self) -> bool {
        let mut over = self.over.subscribe();
        let over = over.wait_for(|over| *over);
        timeout(END_WITHIN, over).await.is_ok()
    }

    /// Its record, with the duration so far.
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
    /// Records a run as lost: it ended with its session while no server followed it.
    async fn lose_run(&self, mut run: BackgroundRun, reason: String) {
        run.status = BackgroundStatus::Lost;
        run.exit_code = follow::EXIT_UNKNOWN;
        run.reason = reason;
        run.ended_at = Some(now_ms());
        if let Err(error) = self.store.finish_run(&run).await {
            tracing::warn!(run = %run.id, %error, "the end of a lost run cannot be stored");
        }
        if let Ok(Some(session)) = self.store.session(&run.session).await {
            self.record_lost(&session, &run.id, &run.reason);
        }
    }

    /// Records `run_ended` for a background run whose end was not observed.
    fn record_lost(&self, session: &Session, run: &RunId, reason: &str) {
        let detail = json!({ "status": "lost", "error": reason, "run_id": run.as_str() });
        self.recorder.event(session, "run_ended", detail);
    }
}
