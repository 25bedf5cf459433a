//! The engine over a fake driver: everything but isolation is real.
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a test that is surprised panics"
)]

mod approvals;
mod audit;
mod background;
mod commands;
mod egress;
mod expiry;
mod exposures;
mod files;
mod history;
mod hostile;
mod keys;
mod lifecycle;
mod pause;
mod pool;
mod recovery;
mod reuse;
mod run;
mod secrets;
mod snapshots;
mod stop;
mod sub_agents;
mod templates;
mod tenants;
mod terminals;
mod usage;
mod watch;

use bytes::Bytes;
use k8e_driver::Driver;
use k8e_engine::{Config, Error, Run, RunEvent, RunRequest, RunTarget, SessionView, Sessions};
use k8e_model::{Code, Command, Outcome, Phase, Principal, Program, SessionId, SessionSpec};
use k8e_store::Store;
use k8e_testkit::FakeDriver;
use std::sync::Arc;
use std::time::Duration;

/// Timeout of every test: none takes long.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server under test.
struct Server {
    dir: tempfile::TempDir,
    driver: FakeDriver,
    store: Store,
    sessions: Sessions,
    config: Config,
}

impl Server {
    async fn start() -> Self {
        Self::with(Config::default(), FakeDriver::new()).await
    }

    async fn with(config: Config, driver: FakeDriver) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).await.unwrap();
        let sessions = Sessions::start(config.clone(), store.clone(), drivers(&driver))
            .await
            .unwrap();
        Self {
            dir,
            driver,
            store,
            sessions,
            config,
        }
    }

    /// Stops the engine and starts another on the same store and driver.
    async fn restart(self) -> Self {
        self.sessions.shutdown().await;
        self.start_again().await
    }

    async fn start_again(self) -> Self {
        let Self {
            dir,
            driver,
            store,
            sessions,
            config,
        } = self;
        drop(sessions);
        let sessions = Sessions::start(config.clone(), store.clone(), drivers(&driver))
            .await
            .unwrap();
        Self {
            dir,
            driver,
            store,
            sessions,
            config,
        }
    }

    async fn create(&self, id: &str) -> SessionView {
        self.sessions.create(&me(), spec(id)).await.unwrap()
    }

    async fn run(&self, id: &str, script: &str) -> Result<(Vec<u8>, Outcome), Error> {
        let request = RunRequest {
            target: RunTarget::Existing(sid(id)),
            command: sh(script),
        };
        finish(self.sessions.run(&me(), request).await?).await
    }

    /// Where a session's output is written down.
    fn transcript_dir(&self, view: &SessionView) -> std::path::PathBuf {
        let name = view.session.sandbox.as_str();
        self.dir.path().join("transcripts").join(name)
    }

    async fn kinds(&self, id: &str) -> Vec<String> {
        let page = self
            .sessions
            .events(&me(), &sid(id), 0, 1000)
            .await
            .unwrap();
        page.events.into_iter().map(|event| event.kind).collect()
    }

    /// Waits for a session to end; returns the reason.
    async fn ended(&self, id: &str) -> String {
        let over = async {
            loop {
                let view = self.sessions.get(&me(), &sid(id)).await.unwrap();
                if view.session.phase == Phase::Ended {
                    return view.session.reason;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, over)
            .await
            .expect("the session ends")
    }

    /// Waits until no sandbox and no live session is left.
    async fn no_sandbox(&self) {
        let gone = async {
            while !self.driver.sandboxes().is_empty() || self.sessions.status().active > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, gone)
            .await
            .expect("every sandbox goes");
    }
}

fn drivers(driver: &FakeDriver) -> Vec<Arc<dyn Driver>> {
    vec![Arc::new(driver.clone())]
}

fn me() -> Principal {
    Principal::certificate("me")
}

fn other() -> Principal {
    Principal::certificate("other")
}

fn sid(text: &str) -> SessionId {
    text.parse().unwrap()
}

fn spec(id: &str) -> SessionSpec {
    SessionSpec {
        id: Some(sid(id)),
        ..SessionSpec::default()
    }
}

fn argv(args: &[&str]) -> Command {
    let args = args
        .iter()
        .map(|arg| Bytes::copy_from_slice(arg.as_bytes()));
    // Not the workspace: the fake's commands run on this machine.
    Command::new(Program::Argv(args.collect()))
        .unwrap()
        .in_dir("/tmp")
        .unwrap()
}

fn sh(script: &str) -> Command {
    argv(&["sh", "-c", script])
}

async fn finish(mut run: Run) -> Result<(Vec<u8>, Outcome), Error> {
    let mut output = Vec::new();
    let all = async {
        while let Some(event) = run.next().await {
            match event? {
                RunEvent::Started { pid } => assert!(pid > 0),
                RunEvent::Stdout(data) | RunEvent::Stderr(data) => output.extend_from_slice(&data),
                RunEvent::Exited(outcome) => return Ok::<_, Error>(outcome),
            }
        }
        panic!("a run ended without an outcome");
    };
    let outcome = tokio::time::timeout(PATIENCE, all)
        .await
        .expect("the run ends")?;
    assert!(run.next().await.is_none());
    Ok((output, outcome))
}

#[track_caller]
fn refused<T>(result: Result<T, Error>, code: Code, text: &str) {
    let Err(error) = result else {
        panic!("expected {code:?}: {text}")
    };
    assert_eq!(error.code(), code, "{error}");
    assert!(error.to_string().contains(text), "{error}");
}
