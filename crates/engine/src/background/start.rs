//! Start of a background run, and re-attachment after a restart of the server.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use super::TrackedRun;
use super::follow::follow;
use crate::guest::Call;
use crate::live::{Live, Purpose, Use};
use crate::metrics::{self, RunEnd};
use crate::recorder::now_ms;
use crate::run::{Begun, Run, exec, refused, shown};
use crate::sessions::Shared;
use crate::{Error, RunRequest, RunTarget, Sessions, secrets};
use futures::future::BoxFuture;
use k8e_model::{
    BACKGROUND_OUTPUT_BYTES_MAX, BackgroundRun, Command, Phase, Principal, RuntimeKind,
};
use k8e_wire::proto::{AttachRun, ErrorCode, StartRun, Started, reply, request};
use serde_json::json;
use std::sync::Arc;
use tokio::time::Instant;

/// A run that started in the background.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackgroundStarted {
    /// Its record at the start.
    pub run: BackgroundRun,
    /// Whether its session was created for it.
    pub session_created: bool,
    /// Runtime of the session.
    pub runtime: RuntimeKind,
}

// === impl Sessions ===

impl Sessions {
    /// Starts a command that outlives this call, in an existing session or one created for it. Its output
    /// is kept up to [`BACKGROUND_OUTPUT_BYTES_MAX`].
    pub async fn start_background(
        &self,
        who: &Principal,
        request: RunRequest,
    ) -> Result<BackgroundStarted, Error> {
        let mut audit = self.audited(who, "run.background", request.target.named());
        let started = self.start_background_in(who, request).await;
        if let Ok(started) = &started {
            audit.about(started.run.id.as_str());
        }
        audit.end(started)
    }

    async fn start_background_in(
        &self,
        who: &Principal,
        request: RunRequest,
    ) -> Result<BackgroundStarted, Error> {
        let mut command = request.command;
        if command.stdin {
            let what = "a background run takes no standard input: write it to a file";
            return Err(Error::Invalid(what.to_owned()));
        }
        command.output_bytes_max = Some(BACKGROUND_OUTPUT_BYTES_MAX);
        let spec = match request.target {
            RunTarget::Tenant(spec) => spec,
            RunTarget::Existing(id) => {
                let live = self.live(who, &id).await?;
                return self.begin_background(live, false, &command).await;
            }
            RunTarget::Fresh(_) => {
                let what = "a background run needs a session that stays: leave out fresh";
                return Err(Error::Invalid(what.to_owned()));
            }
        };
        let start = |live, created| self.begin_background(live, created, &command);
        let started = self.start_in_run_session(who, &spec, start).await;
        started.map(|(started, _)| started)
    }

    /// Starts the command in its own task: once the guest has it, it goes on, also when this future is
    /// dropped.
    async fn begin_background(
        &self,
        live: Arc<Live>,
        created: bool,
        command: &Command,
    ) -> Result<BackgroundStarted, Error> {
        let Ok(work) = Arc::clone(&self.shared.work).try_read_owned() else {
            return Err(Error::Stopping);
        };
        let (shared, command) = (Arc::clone(&self.shared), command.clone());
        let begun = self.shared.runtime.spawn(async move {
            let _work = work;
            let runtime = live.record.runtime;
            let run = begin(&shared, live, &command).await?;
            Ok(BackgroundStarted {
                run,
                session_created: created,
                runtime,
            })
        });
        begun.await.unwrap_or(Err(Error::Stopping))
    }
}

// === impl Shared ===

impl Shared {
    /// Crash recovery: re-attaches to every background run of an earlier server.
    pub(crate) async fn resume_runs(self: &Arc<Self>) -> Result<(), Error> {
        for run in self.store.unended_runs().await? {
            let live = self.find_any(&run.session);
            let used = live
                .as_ref()
                .and_then(|live| live.begin_anyway(Purpose::Background, &self.recorder).ok());
            match live.zip(used) {
                Some((live, used)) => {
                    let tracked = self.background.add(live, run);
                    self.runtime.spawn(resume(Arc::clone(self), tracked, used));
                }
                None => {
                    let reason = "its session ended while the server was away";
                    self.lose_run(run, reason.to_owned()).await;
                }
            }
        }
        Ok(())
    }
}

async fn begin(
    shared: &Arc<Shared>,
    live: Arc<Live>,
    command: &Command,
) -> Result<BackgroundRun, Error> {
    let runs_max = shared.config.background_runs_per_session_max;
    let used = live.begin(Purpose::Background, runs_max, &shared.recorder)?;
    let program = shown(&command.program);
    let session = live.record.id.clone();
    // The default of a background run is no timeout.
    let timeout = command.timeout.or(None);
    let record = BackgroundRun::new(session, program.clone(), timeout, now_ms());
    shared.store.insert_run(&record).await?;
    let limits_before = live.limit_events();
    let egress_before = live.egress_mark();
    let started = Instant::now();
    let (call, pid) = match start_call(shared, used, &record, command).await {
        Ok(started) => started,
        Err(error) => {
            let detail = json!({ "program": program, "error": error.to_string() });
            shared.recorder.event(&live.record, "run_failed", detail);
            metrics::run_ended(live.record.runtime, RunEnd::NotStarted);
            shared.store.remove_run(&record.id).await.ok();
            let Error::GuestGone(_) = error else {
                return Err(error);
            };
            shared.end_sandbox(&live, "died", "the sandbox's agent is gone");
            return Err(live.gone());
        }
    };
    metrics::run_started(live.record.runtime, started.elapsed());
    shared.recorder.event(
        &live.record,
        "run_started",
        json!({ "program": program, "pid": pid, "run_id": record.id.as_str(), "background": true }),
    );
    let tracked = shared.background.add(Arc::clone(&live), record.clone());
    let begun = Begun {
        call,
        pid,
        started,
        timeout,
        output_bytes_max: command.output_bytes_max,
        stdin: false,
        limits_before,
        egress_before,
    };
    let run = Run::new(shared, live, begun).in_background(&tracked, true);
    shared
        .runtime
        .spawn(follow(Arc::clone(shared), tracked, run));
    Ok(record)
}

async fn start_call(
    shared: &Shared,
    used: Use,
    record: &BackgroundRun,
    command: &Command,
) -> Result<(Call, i32), Error> {
    let session = &used.live.record;
    let secrets = secrets::resolve(&shared.store, session).await?;
    let request = request::Call::StartRun(StartRun {
        id: record.id.to_string(),
        exec: Some(exec(session, &secrets, command, record.timeout)),
    });
    let mut call = Call::start(used, request, "run".to_owned()).await?;
    match call.any_reply().await? {
        reply::Reply::Started(Started { pid }) if pid > 0 => Ok((call, pid)),
        reply::Reply::Error(error) => Err(refused(&call, &error, &command.program)),
        _ => Err(call.misbehaved("it did not report that a command started")),
    }
}

/// The same, as a type that does not depend on itself: following a run may lead here again.
pub(super) fn resume_boxed(
    shared: Arc<Shared>,
    tracked: Arc<TrackedRun>,
    used: Use,
) -> BoxFuture<'static, ()> {
    Box::pin(resume(shared, tracked, used))
}

async fn resume(shared: Arc<Shared>, tracked: Arc<TrackedRun>, used: Use) {
    let (live, record) = (Arc::clone(&tracked.live), tracked.record().clone());
    let request = request::Call::AttachRun(AttachRun {
        id: record.id.to_string(),
        now: false,
    });
    let attached = async {
        // A paused guest accepts connections and answers none; they would pile up.
        let mut phases = live.phases();
        phases.wait_for(|phase| *phase != Phase::Paused).await.ok();
        let mut call = Call::start(used, request, "follow a run".to_owned()).await?;
        match call.any_reply().await? {
            reply::Reply::Started(Started { pid }) if pid > 0 => Ok((call, pid)),
            reply::Reply::Error(error) if error.code() == ErrorCode::NotFound => {
                Err(Error::RunNotFound(record.id.clone()))
            }
            reply::Reply::Error(error) => Err(call.refused(&error)),
            _ => Err(call.misbehaved("it did not report what runs")),
        }
    };
    match attached.await {
        Ok((call, pid)) => {
            let (now, so_far) = (Instant::now(), tracked.view().duration);
            let begun = Begun {
                call,
                pid,
                started: now.checked_sub(so_far).unwrap_or(now),
                timeout: record.timeout,
                output_bytes_max: Some(BACKGROUND_OUTPUT_BYTES_MAX),
                stdin: false,
                limits_before: live.limit_events(),
                egress_before: live.egress_mark(),
            };
            // How much output the earlier server transcribed is unknown, so none is transcribed now.
            let run = Run::new(&shared, live, begun).in_background(&tracked, false);
            follow(shared, tracked, run).await;
        }
        Err(error) => {
            shared.record_lost(&live.record, &record.id, &error.to_string());
            shared.fail_run(&tracked, &error).await;
        }
    }
}
