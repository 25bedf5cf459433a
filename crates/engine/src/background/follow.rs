//! Follower task of one background run: follows it to its end and stores that.

use super::{TrackedRun, start, watch};
use crate::error::chain;
use crate::guest::{Call, misbehaved};
use crate::live::Purpose;
use crate::recorder::now_ms;
use crate::sessions::Shared;
use crate::{Error, Run, RunEvent};
use k8e_model::{BackgroundRun, BackgroundStatus, Outcome};
use k8e_wire::proto::{ForgetRun, request};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

const SIGKILL: i32 = 9;

/// Exit code of a run whose real one is unknown.
pub(super) const EXIT_UNKNOWN: i32 = -1;

/// Back-off between attempts to store an end: a busy disk is free a moment later.
const RETRY_PAUSES: [Duration; 3] = [
    Duration::from_millis(100),
    Duration::from_secs(1),
    Duration::from_secs(10),
];

/// Follows a run to its end. At shutdown the run stays with its guest.
pub(super) async fn follow(shared: Arc<Shared>, tracked: Arc<TrackedRun>, mut run: Run) {
    let end = loop {
        let event = tokio::select! {
            biased;
            () = shared.stopped() => return,
            () = tracked.live.detached() => {
                drop(run);
                return attach_again(shared, tracked).await;
            }
            event = run.next() => event,
        };
        match event {
            Some(Ok(RunEvent::Exited(outcome))) => break Ok(outcome),
            Some(Ok(_)) => {}
            Some(Err(error)) => break Err(error),
            None => break Err(misbehaved(&run.session_id, "a run ended without an end")),
        }
    };
    match end {
        Ok(outcome) => shared.end_run(&tracked, outcome).await,
        Err(error) => shared.fail_run(&tracked, &error).await,
    }
}

/// Follows a run again when its session, which is being saved, is active again.
async fn attach_again(shared: Arc<Shared>, tracked: Arc<TrackedRun>) {
    match tracked
        .live
        .begin_anyway(Purpose::Background, &shared.recorder)
    {
        Ok(used) => {
            let attached = start::resume_boxed(Arc::clone(&shared), tracked, used);
            shared.runtime.spawn(attached);
        }
        Err(error) => shared.fail_run(&tracked, &error).await,
    }
}

// === impl Shared ===

impl Shared {
    async fn end_run(&self, tracked: &TrackedRun, outcome: Outcome) {
        let mut run = tracked.view();
        run.end(outcome);
        if tracked.is_cancelled() && run.signal == SIGKILL {
            run.status = BackgroundStatus::Cancelled;
            run.reason = "it was cancelled".to_owned();
        }
        match watch::read_so_far(self, tracked).await {
            Ok((stdout, stderr)) => {
                (run.stdout, run.stderr) = (stdout.bytes, stderr.bytes);
            }
            Err(error) => {
                run.reason = format!("its output could not be read: {error}");
                (run.stdout_truncated, run.stderr_truncated) = (true, true);
            }
        }
        self.finish_run(tracked, run).await;
    }

    /// Records the end of a run that cannot be followed any more.
    pub(super) async fn fail_run(&self, tracked: &TrackedRun, error: &Error) {
        let mut run = tracked.view();
        run.reason = error.to_string();
        (run.status, run.exit_code, run.signal) = (BackgroundStatus::Failed, EXIT_UNKNOWN, 0);
        if let Error::SessionEnded { .. } = error {
            // Everything in a sandbox is killed with it.
            (run.exit_code, run.signal) = (128 + SIGKILL, SIGKILL);
            run.status = BackgroundStatus::Cancelled;
        }
        if let Error::RunNotFound(_) = error {
            run.status = BackgroundStatus::Lost;
            run.reason =
                "the server stopped before it had started, or its sandbox forgot it".into();
        }
        (run.stdout_truncated, run.stderr_truncated) = (true, true);
        self.finish_run(tracked, run).await;
    }

    async fn finish_run(&self, tracked: &TrackedRun, mut run: BackgroundRun) {
        // During shutdown no new work begins: the next server gets this end from the guest.
        let Ok(_work) = Arc::clone(&self.work).try_read_owned() else {
            return;
        };
        run.ended_at = Some(now_ms());
        let id = run.id.clone();
        tracked.record().clone_from(&run);
        tracked.over.send_replace(true);
        if !self.write_end(&run).await {
            // It stays in memory and with its guest, whose number of runs is bounded.
            return;
        }
        self.forget_run(tracked, &run).await;
        self.background.remove(&id);
    }

    async fn write_end(&self, run: &BackgroundRun) -> bool {
        for pause in RETRY_PAUSES {
            match self.store.finish_run(run).await {
                Ok(()) => return true,
                Err(error) => {
                    tracing::warn!(run = %run.id, error = chain(&error), "the end of a run cannot be written");
                }
            }
            sleep(pause).await;
        }
        self.store.finish_run(run).await.is_ok()
    }

    /// Frees the run in its guest. If the call fails, the guest frees it at the end of the session.
    async fn forget_run(&self, tracked: &TrackedRun, run: &BackgroundRun) {
        let forgotten = async {
            let used = tracked.live.begin_anyway(Purpose::Call, &self.recorder)?;
            let id = run.id.to_string();
            let request = request::Call::ForgetRun(ForgetRun { id });
            let mut call = Call::start(used, request, "forget a run".to_owned()).await?;
            call.reply().await
        };
        if let Err(error) = forgotten.await {
            tracing::debug!(run = %run.id, %error, "a guest could not be asked to free an ended run");
        }
    }
}
