//! The server under test: the calls that are measured, and those around them.

use crate::Globals;
use crate::failure::Failure;
use k8e_api::client::Client;
use k8e_api::v1::{self, run_event::Event, run_request::Message, run_start::Program};
use k8e_model::RuntimeKind;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::task::JoinSet;

/// Killed, we leave no session longer than this behind; the longest part takes less.
const IDLE_TIMEOUT_S: i64 = 900;

/// Enough to be another size.
const OTHER_DISK_BYTES: u64 = 16 * 1024 * 1024;

/// How long the kernel removes namespaces and mounts after their last process, ours or the host's:
/// most of it is waiting for all CPUs.
const AFTERMATH: Duration = Duration::from_millis(20);

/// How long a pool may take to have something ready, and how often it is asked.
const POOL_WAIT: Duration = Duration::from_secs(60);
const POOL_PAUSE: Duration = Duration::from_millis(5);

/// Sessions destroyed at once when all are.
const DESTROYED_AT_ONCE: usize = 8;

/// What a new session shall get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// A sandbox that waits, when there is one.
    Warm,
    /// A sandbox that is made for it.
    Cold,
}

/// The server under test. A clone uses the same connection.
#[derive(Clone)]
pub(super) struct Server {
    client: Client,
    /// Of this run alone: what it leaves is found by it.
    tenant: String,
    /// A size that no pool has: who asks for it gets a new sandbox.
    cold_disk_bytes: u64,
    cli: Vec<OsString>,
}

// === impl Server ===

impl Server {
    pub(super) fn new(
        client: Client,
        status: &v1::Status,
        globals: &Globals,
    ) -> Result<Self, Failure> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default().as_millis();
        let limits = status.default_limits.unwrap_or_default();
        Ok(Self {
            client,
            tenant: format!("bench-{}-{now}", std::process::id()),
            cold_disk_bytes: limits.disk_bytes + OTHER_DISK_BYTES,
            cli: cli_line(globals)?,
        })
    }

    /// The same over another connection.
    pub(super) fn over(&self, client: Client) -> Self {
        Self {
            client,
            ..self.clone()
        }
    }

    /// A new session.
    pub(super) async fn create(
        &mut self,
        runtime: RuntimeKind,
        start: Start,
    ) -> Result<String, Failure> {
        let disk_bytes = match start {
            Start::Warm => 0,
            Start::Cold => self.cold_disk_bytes,
        };
        let request = v1::CreateSessionRequest {
            tenant: self.tenant.clone(),
            runtime: runtime.to_string(),
            idle_timeout_s: IDLE_TIMEOUT_S,
            limits: Some(v1::Limits {
                disk_bytes,
                ..Default::default()
            }),
            ..Default::default()
        };
        let session = self.client.create_session(request).await?;
        Ok(session.into_inner().session_id)
    }

    pub(super) async fn destroy(&mut self, session_id: String) -> Result<(), Failure> {
        let request = v1::DestroySessionRequest { session_id };
        self.client.destroy_session(request).await?;
        Ok(())
    }

    /// `true`, to its end.
    pub(super) async fn exec_true(&mut self, session_id: String) -> Result<(), Failure> {
        let args = vec!["/bin/true".into()];
        let start = v1::RunStart {
            session_id,
            program: Some(Program::Argv(v1::Argv { args })),
            ..Default::default()
        };
        let start = v1::RunRequest {
            message: Some(Message::Start(start)),
        };
        let run = self.client.run(tokio_stream::once(start)).await?;
        let mut events = run.into_inner();
        while let Some(event) = events.message().await? {
            if let Some(Event::Exited(exited)) = event.event {
                let code = exited.exit_code;
                let failed = || Failure::request(format!("true exited with {code}"), "bench");
                return (code == 0).then_some(()).ok_or_else(failed);
            }
        }
        Err(Failure::request("a run ended without its result", "bench"))
    }

    /// This program as a process: `k8e sandbox run` in a session of its own.
    pub(super) fn cli_fresh(&self, runtime: RuntimeKind, code: &str) -> Command {
        let mut command = self.cli(code);
        command.args(["--fresh", "--runtime", runtime.as_str()]);
        command.args(["--tenant", &self.tenant]);
        command
    }

    /// This program as a process: `k8e sandbox run` in a live session.
    pub(super) fn cli_python(&self, session_id: &str, code: &str) -> Command {
        let mut command = self.cli(code);
        command.args(["--lang", "python", "--session-id", session_id]);
        command
    }

    fn cli(&self, code: &str) -> Command {
        let mut command = super::host::quiet(&self.cli[0]);
        command.args(&self.cli[1..]).args(["sandbox", "run", code]);
        command
            .env_remove("K8E_SANDBOX_SESSION_ID")
            .env_remove("K8E_SANDBOX_TENANT");
        command
    }

    pub(super) async fn sessions_active(&mut self) -> Result<u32, Failure> {
        let status = self.client.get_status(v1::GetStatusRequest {}).await?;
        Ok(status.into_inner().sessions_active)
    }

    /// The pools of these runtimes, in their order.
    pub(super) async fn pools(&mut self, of: &[RuntimeKind]) -> Result<Vec<v1::Pool>, Failure> {
        let pools = self.client.get_pools(v1::GetPoolsRequest {}).await?;
        let pools = pools.into_inner().pools;
        let of_runtime = |runtime: &RuntimeKind| {
            let is = |pool: &&v1::Pool| pool.runtime == runtime.as_str();
            pools.iter().filter(is).cloned().collect::<Vec<_>>()
        };
        Ok(of.iter().flat_map(of_runtime).collect())
    }

    /// Waits until the kernel is done with what was measured before, and each pool of these has something ready and launches nothing, so that a claim is
    /// a hit and no refill disturbs what is measured next, be it ours or the host's.
    pub(super) async fn settle(&mut self, of: &[RuntimeKind]) -> Result<(), Failure> {
        let deadline = Instant::now() + POOL_WAIT;
        loop {
            let pools = self.pools(of).await?;
            let Some(pool) = pools.iter().find(|pool| !is_settled(pool)) else {
                tokio::time::sleep(AFTERMATH).await;
                return Ok(());
            };
            if Instant::now() > deadline {
                let (runtime, waited) = (&pool.runtime, POOL_WAIT.as_secs());
                return Err(Failure::request(
                    format!("the pool of {runtime} has nothing ready after {waited} s"),
                    pool.failure.clone(),
                ));
            }
            tokio::time::sleep(POOL_PAUSE).await;
        }
    }

    /// Destroys every session of this run.
    pub(super) async fn destroy_all(&mut self) -> Result<(), Failure> {
        for phase in ["creating", "active"] {
            let request = v1::ListSessionsRequest {
                phase: phase.to_owned(),
                tenant: self.tenant.clone(),
            };
            let listed = self.client.list_sessions(request).await?.into_inner();
            let mut destroys = JoinSet::new();
            for session in listed.sessions {
                if destroys.len() >= DESTROYED_AT_ONCE {
                    joined(destroys.join_next().await)?;
                }
                let mut server = self.clone();
                destroys.spawn(async move { server.destroy(session.session_id).await });
            }
            while let Some(destroyed) = destroys.join_next().await {
                joined(Some(destroyed))?;
            }
        }
        Ok(())
    }
}

/// What a task came to.
pub(super) fn joined<T: Default>(
    task: Option<Result<Result<T, Failure>, tokio::task::JoinError>>,
) -> Result<T, Failure> {
    match task {
        None => Ok(T::default()),
        Some(Ok(done)) => done,
        Some(Err(e)) => Err(Failure::request(format!("a task failed: {e}"), "internal")),
    }
}

/// A pool that wants nothing ready never will have: claims of it are cold, and told as misses.
fn is_settled(pool: &v1::Pool) -> bool {
    pool.pending == 0 && (pool.ready > 0 || pool.target == 0)
}

/// This program, talking to the same server.
fn cli_line(globals: &Globals) -> Result<Vec<OsString>, Failure> {
    let own = std::env::current_exe().map_err(|e| Failure::io("find this program", &e))?;
    let mut line: Vec<OsString> = vec![own.into(), "--no-autostart".into()];
    let mut flag = |name: &str, value: &Path| line.extend([name.into(), value.into()]);
    flag("--data-dir", &globals.data_dir);
    if let Some(endpoint) = &globals.endpoint {
        flag("--endpoint", Path::new(endpoint));
    }
    if let Some(dir) = &globals.cert_dir {
        flag("--cert-dir", dir);
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_waited_for_only_when_something_comes() {
        let pool = |target, ready, pending| v1::Pool {
            target,
            ready,
            pending,
            ..Default::default()
        };
        assert!(is_settled(&pool(2, 2, 0)));
        assert!(is_settled(&pool(2, 1, 0)));
        assert!(!is_settled(&pool(2, 1, 1)));
        assert!(!is_settled(&pool(2, 0, 0)));
        assert!(is_settled(&pool(0, 0, 0)));
    }
}
