//! Following one background run to its end, and writing that down.

use super::{Kept, watch};
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

/// Of a run of which it is not known.
pub(super) const EXIT_UNKNOWN: i32 = -1;

/// Pauses between attempts to write an end down: a busy disk is free a moment later.
const RETRY_PAUSES: [Duration; 3] = [
    Duration::from_millis(100),
    Duration::from_secs(1),
    Duration::from_secs(10),
];

/// Follows a run to its end. When the server stops first, the run stays with its guest.
pub(super) async fn keep(shared: Arc<Shared>, kept: Arc<Kept>, mut run: Run) {
    let end = loop {
        let event = tokio::select! {
            biased;
            () = shared.stopped() => return,
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
        Ok(outcome) => shared.end_run(&kept, outcome).await,
        Err(error) => shared.fail_run(&kept, &error).await,
    }
}

// === impl Shared ===

impl Shared {
    async fn end_run(&self, kept: &Kept, outcome: Outcome) {
        let mut run = kept.view();
        run.end(outcome);
        if kept.is_cancelled() && run.signal == SIGKILL {
            run.status = BackgroundStatus::Cancelled;
            run.reason = "somebody cancelled it".to_owned();
        }
        match watch::read_so_far(self, kept).await {
            Ok((stdout, stderr)) => {
                (run.stdout, run.stderr) = (stdout.bytes, stderr.bytes);
            }
            Err(error) => {
                run.reason = format!("what it wrote could not be read: {error}");
                (run.stdout_truncated, run.stderr_truncated) = (true, true);
            }
        }
        self.finish_run(kept, run).await;
    }

    /// A run that nobody can follow any more.
    pub(super) async fn fail_run(&self, kept: &Kept, error: &Error) {
        let mut run = kept.view();
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
        self.finish_run(kept, run).await;
    }

    async fn finish_run(&self, kept: &Kept, mut run: BackgroundRun) {
        // While the server stops nothing new begins: the next one hears of this end from the guest.
        let Ok(_work) = Arc::clone(&self.work).try_read_owned() else {
            return;
        };
        run.ended_at = Some(now_ms());
        let id = run.id.clone();
        kept.record().clone_from(&run);
        kept.over.send_replace(true);
        if !self.write_end(&run).await {
            // It stays in memory and with its guest, which takes only so many.
            return;
        }
        self.forget_run(kept, &run).await;
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

    /// Frees what its guest keeps. One that does not hear of it ends with its session.
    async fn forget_run(&self, kept: &Kept, run: &BackgroundRun) {
        let forgotten = async {
            let used = kept.live.begin_anyway(Purpose::Call, &self.recorder)?;
            let id = run.id.to_string();
            let request = request::Call::ForgetRun(ForgetRun { id });
            let mut call = Call::start(used, request, "forget a run".to_owned()).await?;
            call.reply().await
        };
        if let Err(error) = forgotten.await {
            tracing::debug!(run = %run.id, %error, "a guest was not told to forget a run");
        }
    }
}
