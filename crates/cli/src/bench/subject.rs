//! What is measured, and how each is done once.

use crate::Globals;
use crate::failure::Failure;
use k8e_api::client::Client;
use k8e_api::v1::{self, run_event::Event, run_request::Message, run_start::Program};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// `true` on the host: the floor.
    ForkExec,
    /// `true` under bubblewrap: the nearest thing people use.
    Bubblewrap,
    /// A session with a sandbox that waited for it.
    Claim,
    /// A new sandbox, to where it answers.
    Create,
    /// `true` in a live session.
    Exec,
    /// A sandbox for one `true`, and its removal.
    Fresh,
    /// The `k8e sandbox run` process from start to end, in a live session.
    CliRun,
}

/// Everything that measuring needs.
pub(super) struct Bench {
    client: Client,
    session_id: String,
    /// A size that no pool has: who asks for it gets a new sandbox.
    cold_disk_bytes: u64,
    cli: Vec<std::ffi::OsString>,
    subjects: Vec<Subject>,
}

const BWRAP: &str = "bwrap";

/// Enough to be another size.
const OTHER_DISK_BYTES: u64 = 16 * 1024 * 1024;

// === impl Subject ===

impl Subject {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ForkExec => "host fork+exec true",
            Self::Bubblewrap => "bubblewrap true",
            Self::Claim => "create (warm)",
            Self::Create => "create (cold)",
            Self::Exec => "exec true, live session",
            Self::Fresh => "create+exec+destroy",
            Self::CliRun => "k8e sandbox run, live session",
        }
    }
}

// === impl Bench ===

impl Bench {
    /// Makes the session that stays open, and finds out what can be measured.
    pub(super) async fn start(mut client: Client, globals: &Globals) -> Result<Self, Failure> {
        let mut subjects = vec![Subject::ForkExec];
        if host(&mut bubblewrap()).is_ok() {
            subjects.push(Subject::Bubblewrap);
        }
        if !client
            .get_pools(v1::GetPoolsRequest {})
            .await?
            .get_ref()
            .pools
            .is_empty()
        {
            subjects.push(Subject::Claim);
        }
        subjects.extend([
            Subject::Create,
            Subject::Exec,
            Subject::Fresh,
            Subject::CliRun,
        ]);
        let status = client
            .get_status(v1::GetStatusRequest {})
            .await?
            .into_inner();
        let disk_bytes = status.default_limits.unwrap_or_default().disk_bytes;
        let session_id = create(&mut client, 0).await?;
        Ok(Self {
            client,
            session_id,
            cold_disk_bytes: disk_bytes + OTHER_DISK_BYTES,
            cli: cli_line(globals)?,
            subjects,
        })
    }

    pub(super) fn subjects(&self) -> Vec<Subject> {
        self.subjects.clone()
    }

    /// Does it once. What belongs to it is in the time, what only cleans up is not.
    pub(super) async fn measure(&mut self, subject: Subject) -> Result<Duration, Failure> {
        let start = Instant::now();
        match subject {
            Subject::ForkExec => host(&mut Command::new("true"))?,
            Subject::Bubblewrap => host(&mut bubblewrap())?,
            Subject::Claim | Subject::Create => {
                let cold = subject == Subject::Create;
                let disk_bytes = if cold { self.cold_disk_bytes } else { 0 };
                let session_id = create(&mut self.client, disk_bytes).await?;
                let took = start.elapsed();
                destroy(&mut self.client, session_id).await?;
                return Ok(took);
            }
            Subject::Exec => exec_true(&mut self.client, self.session_id.clone()).await?,
            Subject::Fresh => {
                let session_id = create(&mut self.client, 0).await?;
                exec_true(&mut self.client, session_id.clone()).await?;
                destroy(&mut self.client, session_id).await?;
            }
            Subject::CliRun => {
                let session = ["--session-id", self.session_id.as_str()];
                host(
                    Command::new(&self.cli[0])
                        .args(&self.cli[1..])
                        .args(session),
                )?;
            }
        }
        Ok(start.elapsed())
    }

    pub(super) async fn end(mut self) -> Result<(), Failure> {
        destroy(&mut self.client, self.session_id).await
    }
}

fn bubblewrap() -> Command {
    let mut command = Command::new(BWRAP);
    command.args([
        "--unshare-all",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
    ]);
    command.arg("/bin/true");
    command
}

/// This program, talking to the same server.
fn cli_line(globals: &Globals) -> Result<Vec<std::ffi::OsString>, Failure> {
    let own = std::env::current_exe().map_err(|e| Failure::io("find this program", &e))?;
    let mut line: Vec<std::ffi::OsString> = vec![own.into()];
    let mut flag = |name: &str, value: &Path| line.extend([name.into(), value.into()]);
    flag("--data-dir", &globals.data_dir);
    if let Some(endpoint) = &globals.endpoint {
        flag("--endpoint", Path::new(endpoint));
    }
    if let Some(dir) = &globals.cert_dir {
        flag("--cert-dir", dir);
    }
    line.extend(["sandbox", "run", "true"].map(Into::into));
    Ok(line)
}

fn host(command: &mut Command) -> Result<(), Failure> {
    let name = command.get_program().to_string_lossy().into_owned();
    let quiet = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let status = quiet
        .status()
        .map_err(|e| Failure::io(&format!("run {name}"), &e))?;
    if status.success() {
        return Ok(());
    }
    Err(Failure::request(
        format!("{name} failed while it was measured: {status}"),
        "bench",
    ))
}

/// With a disk of that size; 0 is the server's default.
async fn create(client: &mut Client, disk_bytes: u64) -> Result<String, Failure> {
    let request = v1::CreateSessionRequest {
        tenant: "bench".into(),
        // Interrupted, we leave no more than this behind.
        idle_timeout_s: 60,
        limits: Some(v1::Limits {
            disk_bytes,
            ..Default::default()
        }),
        ..Default::default()
    };
    Ok(client
        .create_session(request)
        .await?
        .into_inner()
        .session_id)
}

async fn destroy(client: &mut Client, session_id: String) -> Result<(), Failure> {
    client
        .destroy_session(v1::DestroySessionRequest { session_id })
        .await?;
    Ok(())
}

async fn exec_true(client: &mut Client, session_id: String) -> Result<(), Failure> {
    let program = Some(Program::Argv(v1::Argv {
        args: vec!["/bin/true".into()],
    }));
    let start = v1::RunStart {
        session_id,
        program,
        ..Default::default()
    };
    let start = v1::RunRequest {
        message: Some(Message::Start(start)),
    };
    let mut events = client.run(tokio_stream::once(start)).await?.into_inner();
    while let Some(event) = events.message().await? {
        match event.event {
            Some(Event::Exited(exited)) if exited.exit_code == 0 => return Ok(()),
            Some(Event::Exited(exited)) => {
                let code = exited.exit_code;
                return Err(Failure::request(
                    format!("true exited with {code}"),
                    "bench",
                ));
            }
            _ => {}
        }
    }
    Err(Failure::request("a run ended without its result", "bench"))
}
