//! Start of a foreground run: session selection, the guest's `Exec` request, start errors.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use super::{Begun, Run};
use crate::guest::{Call, clean};
use crate::live::{Live, Purpose, Use};
use crate::metrics::{self, RunEnd};
use crate::sessions::Owned;
use crate::{Error, RunRequest, RunTarget, Sessions, secrets};
use bytes::Bytes;
use k8e_model::{Command, Principal, Program, SecretValue, Session, SessionOrigin, WORKSPACE};
use k8e_store::Store;
use k8e_wire::proto::{self, EnvVar, exec, reply, request};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Environment variables of every command of a sub-agent: its session id, by which its processes are
/// found, and its parent's.
pub(crate) const SESSION_VARIABLE: &str = "K8E_SESSION_ID";
const PARENT_VARIABLE: &str = "K8E_PARENT_SESSION_ID";

/// Bytes of a program's name in an event or an error; longer names are cut.
const SHOWN_BYTES_MAX: usize = 256;

// === impl Sessions ===

impl Sessions {
    /// Runs a command, in an existing session or one created for it. Returns when it has started.
    pub async fn run(&self, who: &Principal, request: RunRequest) -> Result<Run, Error> {
        let mut audit = self.audited(who, "run", request.target.named());
        let run = self.run_in(who, request).await;
        if let Ok(run) = &run {
            audit.about(run.session_id.as_str());
        }
        audit.end(run)
    }

    async fn run_in(&self, who: &Principal, request: RunRequest) -> Result<Run, Error> {
        match request.target {
            RunTarget::Existing(id) => {
                let live = self.live(who, &id).await?;
                self.start_run(live, None, false, request.command).await
            }
            RunTarget::Tenant(spec) => {
                let start =
                    |live, created| self.start_run(live, None, created, request.command.clone());
                let started = self.start_in_run_session(who, &spec, start).await;
                started.map(|(run, _)| run)
            }
            RunTarget::Fresh(spec) => {
                let owned = self.make(who, spec, SessionOrigin::FreshRun).await?;
                self.start_run(Arc::clone(owned.live()), Some(owned), true, request.command)
                    .await
            }
        }
    }

    // No SQL on this path: it determines exec latency.
    async fn start_run(
        &self,
        live: Arc<Live>,
        owned: Option<Owned>,
        created: bool,
        command: Command,
    ) -> Result<Run, Error> {
        let shared = &self.shared;
        let used = live.begin(
            Purpose::Run,
            shared.config.runs_per_session_max,
            &shared.recorder,
        )?;
        let limits_before = live.limit_events();
        let egress_before = live.egress_mark();
        let started = Instant::now();
        let program = shown(&command.program);
        let timeout = command.timeout.or(Some(shared.config.run_timeout));
        let (call, pid) = match start_call(&shared.store, used, &command, timeout).await {
            Ok(started) => started,
            Err(error) => {
                let detail = json!({ "program": program, "error": error.to_string() });
                shared.recorder.event(&live.record, "run_failed", detail);
                metrics::run_ended(live.record.runtime, RunEnd::NotStarted);
                let Error::GuestGone(_) = error else {
                    return Err(error);
                };
                shared.end_sandbox(&live, "died", "the sandbox's agent is gone");
                return Err(if created { error } else { live.gone() });
            }
        };
        // From here on every outcome is recorded as `run_ended`.
        let number = shared.foreground.add(Arc::clone(&live), owned)?;
        metrics::run_started(live.record.runtime, started.elapsed());
        shared.recorder.event(
            &live.record,
            "run_started",
            json!({ "program": program, "pid": pid }),
        );
        let begun = Begun {
            call,
            pid,
            started,
            timeout,
            output_bytes_max: command.output_bytes_max,
            stdin: command.stdin,
            limits_before,
            egress_before,
        };
        let mut run = Run::new(shared, live, begun);
        run.session_created = created;
        run.foreground = Some(number);
        Ok(run)
    }
}

/// Sends `Exec`; returns the call and the command's pid once the guest reports the start.
async fn start_call(
    store: &Store,
    used: Use,
    command: &Command,
    timeout: Option<Duration>,
) -> Result<(Call, i32), Error> {
    let session = &used.live.record;
    let secrets = secrets::resolve(store, session).await?;
    let request = request::Call::Exec(exec(session, &secrets, command, timeout));
    let mut call = Call::start(used, request, "run".to_owned()).await?;
    match call.any_reply().await? {
        reply::Reply::Started(proto::Started { pid }) if pid > 0 => Ok((call, pid)),
        reply::Reply::Error(error) => Err(refused(&call, &error, &command.program)),
        _ => Err(call.misbehaved("it did not say that a command started")),
    }
}

/// What the guest is told. The session's environment goes over the image's, secrets over that, the command's
/// own over all. A command that names no directory or user gets the image's.
/// What tells a sub-agent's processes from others goes over everything.
pub(crate) fn exec(
    session: &Session,
    secrets: &[(String, SecretValue)],
    command: &Command,
    timeout: Option<Duration>,
) -> proto::Exec {
    fn plain<'a>((name, value): (&'a str, &'a str)) -> (&'a str, &'a [u8]) {
        (name, value.as_bytes())
    }
    let image = session.image.as_ref().map(|image| &image.config);
    let of_image = image.into_iter().flat_map(|config| config.env.iter());
    let mut env: BTreeMap<&str, &[u8]> = of_image.map(plain).collect();
    env.extend(session.env.iter().map(plain));
    let secrets = secrets.iter();
    env.extend(secrets.map(|(name, value)| (name.as_str(), value.reveal())));
    env.extend(command.env.iter().map(plain));
    let cwd = session.sub_agent.as_ref().map(|sub| {
        env.extend([
            (SESSION_VARIABLE, session.id.as_str().as_bytes()),
            (PARENT_VARIABLE, sub.parent.as_str().as_bytes()),
        ]);
        sub.cwd.as_str()
    });
    let workdir = image.and_then(|config| config.workdir.as_deref());
    let user = image.and_then(|config| config.user.as_deref());
    let bytes = |text: &str| Bytes::copy_from_slice(text.as_bytes());
    let program = match &command.program {
        Program::Argv(args) => exec::Program::Argv(proto::Argv { args: args.clone() }),
        Program::Code { language, code } => exec::Program::Script(proto::Script {
            interpreter: language
                .interpreter()
                .iter()
                .map(|part| bytes(part))
                .collect(),
            extension: language.extension().to_owned(),
            code: code.clone(),
            in_cwd: language.file_in_cwd(),
        }),
    };
    proto::Exec {
        program: Some(program),
        env: env
            .into_iter()
            .map(|(name, value)| EnvVar {
                name: bytes(name),
                value: Bytes::copy_from_slice(value),
            })
            .collect(),
        cwd: bytes(
            command
                .cwd
                .as_deref()
                .or(cwd)
                .or(workdir)
                .unwrap_or(WORKSPACE),
        ),
        user: command
            .user
            .as_deref()
            .or(user)
            .unwrap_or_default()
            .to_owned(),
        // A timeout under a millisecond is still one: 0 would be none.
        timeout_ms: timeout.map_or(0, |t| {
            u64::try_from(t.as_millis()).unwrap_or(u64::MAX).max(1)
        }),
        output_bytes_max: command.output_bytes_max.unwrap_or(0),
        stdin: command.stdin,
    }
}

pub(crate) fn refused(call: &Call, error: &proto::Error, program: &Program) -> Error {
    if proto::ErrorCode::try_from(error.code) != Ok(proto::ErrorCode::NoProgram) {
        return call.refused(error);
    }
    match program {
        Program::Code { language, .. } => Error::NoInterpreter {
            program: language.interpreter()[0],
            hint: match call.used.live.record.image {
                Some(_) => "the image does not have it; choose an image that does",
                None => language.install_hint(),
            },
        },
        Program::Argv(_) => Error::NoProgram {
            program: shown(program),
        },
    }
}

/// A program's name for events and errors: sanitized and cut.
pub(crate) fn shown(program: &Program) -> String {
    match program {
        Program::Code { language, .. } => language.as_str().to_owned(),
        Program::Argv(args) => {
            let name = args.first().map(|name| &name[..]).unwrap_or_default();
            clean(&String::from_utf8_lossy(
                &name[..name.len().min(SHOWN_BYTES_MAX)],
            ))
        }
    }
}
