//! Event stream of a running command: output, exit, timeouts, and protocol checks of the guest.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use super::{Run, RunEvent, RunInput, Stage, Stream, outcome};
use crate::Error;
use crate::guest::{DEATH_NEWS_TIMEOUT, hung_up, misbehaved};
use crate::live::left_active;
use crate::metrics::{self, RunEnd};
use k8e_model::{Outcome, Phase};
use k8e_wire::proto::{Exited, reply};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

/// Grace period after a command's timeout: the guest kills it at once, but a machine under load may be slow.
const GRACE: Duration = Duration::from_secs(10);

/// Output accepted after timeout and grace period: more than pipes and socket buffers can hold.
const LATE_BYTES_MAX: u64 = 8 * 1024 * 1024;

/// Counted per late frame besides its content, so that endless empty frames reach `LATE_BYTES_MAX` too, within
/// seconds at a guest's rate limit.
const FRAME_OVERHEAD_BYTES: u64 = 1024;

const SIGKILL: i32 = 9;

/// Result of one wait for the guest.
enum Turn {
    Reply(reply::Reply),
    HungUp,
    Broken(String),
    SessionGone,
    Stopping,
    Silent,
}

// === impl Run ===

impl Run {
    /// The command's input; none on the second call. Without `stdin` in the command it takes signals only.
    pub fn take_input(&mut self) -> Option<RunInput> {
        self.input.take()
    }

    /// The next event; none after the last. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<RunEvent, Error>> {
        loop {
            match self.stage {
                Stage::Over => return None,
                Stage::Started(pid) => {
                    self.stage = Stage::Streaming;
                    return Some(Ok(RunEvent::Started { pid }));
                }
                Stage::HungUp(until) => {
                    let error = self.why_hung_up(until).await;
                    return Some(Err(self.fail(error)));
                }
                Stage::Streaming => {}
            }
            if let Some(event) = self.turn().await {
                return Some(event);
            }
        }
    }

    /// Handles one message of the guest; none when it makes no event.
    async fn turn(&mut self) -> Option<Result<RunEvent, Error>> {
        // No queue slot is held while a silent command is waited for. Received output
        // stays in self while it waits for a slot in the transcript queue.
        if self.at_hand.is_none() {
            let turn = self.wait().await;
            self.waiting_since = None;
            let (stream, data) = match turn {
                Turn::Reply(reply::Reply::Stdout(data)) => (Stream::Stdout, data),
                Turn::Reply(reply::Reply::Stderr(data)) => (Stream::Stderr, data),
                other => return self.last(other),
            };
            if let Err(error) = self.count(stream, data.len() as u64) {
                return Some(Err(self.fail(error)));
            }
            if data.is_empty() {
                return None;
            }
            self.at_hand = Some((stream, data));
        }
        let (_, data) = self.at_hand.as_ref()?;
        if self.transcribed {
            self.transcriber
                .write(&self.shared.recorder, &self.live.record.sandbox, data)
                .await;
        }
        let (stream, data) = self.at_hand.take()?;
        Some(Ok(match stream {
            Stream::Stdout => RunEvent::Stdout(data),
            Stream::Stderr => RunEvent::Stderr(data),
        }))
    }

    /// The guest counts as unresponsive when the command's timeout and the grace period are over *and* it
    /// was silent for the grace period: with a slow reader, a run ends long before its output is read.
    ///
    /// A paused guest is silent; its grace period starts again at resume.
    async fn wait(&mut self) -> Turn {
        let waiting = *self.waiting_since.get_or_insert_with(Instant::now);
        let foreground = self.foreground.is_some();
        let Some(call) = self.call.as_mut() else {
            return Turn::HungUp;
        };
        loop {
            let paused = *call.phases.borrow_and_update() == Phase::Paused;
            let since = self.live.resumed().map_or(waiting, |at| at.max(waiting));
            let give_up = self
                .timeout
                .filter(|_| !paused)
                .map(|own| (self.started + own).max(since) + GRACE);
            return tokio::select! {
                biased;
                over = changed(&mut call.phases, paused) => match over {
                    true => Turn::SessionGone,
                    false => continue,
                },
                reply = call.replies.next() => match reply {
                    Ok(reply) => Turn::Reply(reply),
                    Err(e) if hung_up(&e) => Turn::HungUp,
                    Err(e) => Turn::Broken(e.to_string()),
                },
                () = stopped(&mut self.stop, foreground) => Turn::Stopping,
                () = reached(give_up) => Turn::Silent,
            };
        }
    }

    /// Handles everything but output: it ends the run, or leads to its end.
    fn last(&mut self, turn: Turn) -> Option<Result<RunEvent, Error>> {
        let error = match turn {
            Turn::Reply(reply::Reply::Exited(exited)) => match self.exited(&exited) {
                Ok(outcome) => return Some(Ok(RunEvent::Exited(outcome))),
                Err(what) => misbehaved(&self.session_id, what),
            },
            Turn::Reply(reply::Reply::Error(error)) => match &self.call {
                Some(call) => call.refused(&error),
                None => misbehaved(&self.session_id, "it sent a message after the end"),
            },
            Turn::Reply(_) => misbehaved(
                &self.session_id,
                "it sent a message that does not belong to a run",
            ),
            Turn::Broken(what) => misbehaved(&self.session_id, what),
            Turn::SessionGone => self.live.gone(),
            Turn::Stopping => Error::Stopping,
            Turn::Silent => self.unresponsive("it did not end a command after its timeout"),
            Turn::HungUp => {
                self.stage = Stage::HungUp(Instant::now() + DEATH_NEWS_TIMEOUT);
                return None;
            }
        };
        Some(Err(self.fail(error)))
    }

    /// Counts output and enforces the output limits.
    fn count(&mut self, stream: Stream, bytes: u64) -> Result<(), Error> {
        let total = match stream {
            Stream::Stdout => &mut self.stdout_bytes,
            Stream::Stderr => &mut self.stderr_bytes,
        };
        *total += bytes;
        if self.output_bytes_max.is_some_and(|max| *total > max) {
            return Err(misbehaved(
                &self.session_id,
                "it sent more output than was asked for",
            ));
        }
        let late = self
            .timeout
            .is_some_and(|own| self.started + own + GRACE < Instant::now());
        if late {
            self.late_bytes += bytes + FRAME_OVERHEAD_BYTES;
            if self.late_bytes > LATE_BYTES_MAX {
                return Err(
                    self.unresponsive("it kept sending output of a command after its timeout")
                );
            }
        }
        Ok(())
    }

    fn exited(&mut self, exited: &Exited) -> Result<Outcome, &'static str> {
        let seen = outcome::Seen {
            elapsed: self.started.elapsed(),
            stdout_bytes: self.stdout_bytes,
            stderr_bytes: self.stderr_bytes,
            limits_before: self.limits_before,
            limits_after: self.live.limit_events(),
            egress_denied: self.live.denied_since(self.egress_before),
        };
        let outcome = outcome::judge(exited, seen)?;
        let limits: Vec<_> = outcome
            .limits_hit
            .iter()
            .map(|limit| limit.as_str())
            .collect();
        let cancelled = outcome.signal == SIGKILL
            && (self.background.as_ref()).is_some_and(|tracked| tracked.is_cancelled());
        let (end, status) = match cancelled {
            true => (RunEnd::Cancelled, "cancelled"),
            false => (RunEnd::from(&outcome), outcome.status.as_str()),
        };
        let mut detail = json!({
            "exit_code": outcome.exit_code,
            "signal": outcome.signal,
            "status": status,
            "duration_ms": u64::try_from(outcome.duration.as_millis()).unwrap_or(u64::MAX),
            "stdout_bytes": outcome.stdout_bytes,
            "stderr_bytes": outcome.stderr_bytes,
            "limits_hit": limits,
        });
        let denied = outcome.egress_denied.iter();
        let denied: Vec<&str> = denied.filter_map(|flow| flow.name.as_deref()).collect();
        if !denied.is_empty() {
            detail["egress_denied"] = json!(denied);
        }
        self.over(end, detail);
        Ok(outcome)
    }

    /// Ends the session of an unresponsive guest, which did not end a command in time.
    fn unresponsive(&mut self, what: &str) -> Error {
        self.shared.recorder.event(
            &self.live.record,
            "guest_unresponsive",
            json!({ "what": what }),
        );
        self.shared.end_sandbox(
            &self.live,
            "destroyed",
            &format!("its agent was unresponsive: {what}"),
        );
        misbehaved(&self.session_id, what)
    }

    async fn why_hung_up(&mut self, until: Instant) -> Error {
        let news = match self.call.as_mut() {
            Some(call) => timeout_at(until, left_active(&mut call.phases))
                .await
                .is_ok(),
            None => false,
        };
        if news {
            self.live.gone()
        } else {
            misbehaved(
                &self.session_id,
                "it closed the connection in the middle of a run",
            )
        }
    }

    fn fail(&mut self, error: Error) -> Error {
        if let Error::GuestMisbehaved { what, .. } = &error {
            tracing::warn!(session = %self.session_id, what, "a sandbox's agent violated the protocol");
        }
        let detail = json!({ "status": "failed", "error": error.to_string() });
        self.over(RunEnd::Failed, detail);
        error
    }

    /// Records the end, unless shutdown has, closes the connection, and releases the session; one created for
    /// this run alone is destroyed.
    fn over(&mut self, end: RunEnd, detail: Value) {
        self.stage = Stage::Over;
        let under_way = self
            .foreground
            .map(|number| self.shared.foreground.remove(number));
        if !matches!(under_way, Some(None)) {
            self.record_end(end, detail);
        }
        self.inputs = None;
        self.call = None;
        drop(under_way);
    }

    fn record_end(&mut self, end: RunEnd, mut detail: Value) {
        metrics::run_ended(self.runtime, end);
        let (recorder, record) = (&self.shared.recorder, &self.live.record);
        let lost_bytes = self.transcriber.finish(recorder, &record.sandbox);
        if lost_bytes > 0 {
            detail["transcript_lost_bytes"] = json!(lost_bytes);
        }
        if let Some(tracked) = &self.background {
            detail["run_id"] = json!(tracked.id().as_str());
        }
        recorder.event(record, "run_ended", detail);
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if !matches!(self.stage, Stage::Over) && self.background.is_none() {
            self.over(RunEnd::Cancelled, json!({ "status": "cancelled" }));
        }
    }
}

/// Resolves when the session is paused, resumed or ending; returns whether it is ending.
async fn changed(phases: &mut watch::Receiver<Phase>, paused: bool) -> bool {
    let news = |phase: &Phase| phase.is_ending() || (*phase == Phase::Paused) != paused;
    // A closed channel: the session has ended.
    phases
        .wait_for(news)
        .await
        .map_or(true, |phase| phase.is_ending())
}

/// Resolves at shutdown; never for a background run, which outlives the server.
async fn stopped(stop: &mut watch::Receiver<bool>, foreground: bool) {
    // A closed channel: the server has stopped.
    match foreground {
        true => drop(stop.wait_for(|stop| *stop).await),
        false => std::future::pending().await,
    }
}

/// Resolves at the given time, or never.
async fn reached(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
