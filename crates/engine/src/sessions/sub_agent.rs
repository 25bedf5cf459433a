//! Sub-agents: sessions that share the sandbox of their parent session.
//!
//! A sub-agent has its own record, history, runs and terminals. Sandbox, network, limits and files
//! are its parent's, so its end removes no sandbox: its processes are found and killed.

use super::create::{open, write_down};
use super::{Owned, Sessions, Shared, tenant_of};
use crate::guest::{Call, workspace};
use crate::live::{Live, Purpose, left_active, within};
use crate::metrics::{self, Start};
use crate::recorder::now_ms;
use crate::run::SESSION_VARIABLE;
use crate::{Error, SessionView};
use bytes::Bytes;
use k8e_model::{
    Lifetime, Phase, Principal, SandboxId, Session, SessionId, SessionOrigin, SubAgent,
    SubAgentSpec,
};
use k8e_wire::proto::{EndProcesses, EndRun, EndTerminal, ForgetRun, MakeDir, request};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Timeout for a guest to kill all processes of a sub-agent: each step takes a few seconds at most.
const END_WITHIN: Duration = Duration::from_secs(60);

// === impl Sessions ===

impl Sessions {
    /// Creates a sub-agent of a session.
    ///
    /// Guarantees: on failure, or when the returned future is dropped, nothing is left but maybe the
    /// directory that was asked for.
    pub async fn create_sub_agent(
        &self,
        who: &Principal,
        parent: &SessionId,
        spec: SubAgentSpec,
    ) -> Result<SessionView, Error> {
        let mut audit = self.audited(who, "session.sub_agent", parent.as_str());
        let made = self.make_sub_agent(who, parent, spec).await;
        if let Ok(view) = &made {
            audit.about(view.session.id.as_str());
        }
        audit.end(made)
    }

    async fn make_sub_agent(
        &self,
        who: &Principal,
        parent: &SessionId,
        spec: SubAgentSpec,
    ) -> Result<SessionView, Error> {
        let since = Instant::now();
        let parent = self.live(who, parent).await?;
        if parent.parent().is_some() {
            return Err(Error::TooDeep(parent.record.id.clone()));
        }
        let Ok(work) = Arc::clone(&self.shared.work).try_read_owned() else {
            return Err(Error::Stopping);
        };
        tenant_of(who, Some(&parent.record.tenant))?;
        let owned = self.shared.admit_sub_agent(&parent, &spec)?;
        let (done, made) = oneshot::channel();
        self.shared.runtime.spawn(async move {
            let _work = work;
            // When the caller is gone, the result is dropped here and the sub-agent ended.
            done.send(build(owned, parent, spec, since).await).ok();
        });
        let live = made.await.unwrap_or(Err(Error::Stopping))?.keep();
        Ok(self.view(&live))
    }
}

// === impl Shared ===

impl Shared {
    /// Admission control: reserves a slot within the session limits and the parent's limit of sub-agents.
    fn admit_sub_agent(
        self: &Arc<Self>,
        parent: &Arc<Live>,
        spec: &SubAgentSpec,
    ) -> Result<Owned, Error> {
        let live = Arc::new(Live::new_child(record(&parent.snapshot(), spec), parent));
        {
            let mut index = self.index();
            let Session {
                id, owner, tenant, ..
            } = &live.record;
            self.has_place(&index, id, owner, tenant)
                .map_err(metrics::refused)?;
            parent.add_sub_agent(&live)?;
            index.sessions.insert(id.clone(), Arc::clone(&live));
        }
        Ok(Owned::new(self, live))
    }

    /// Ends the sub-agents of a session that is about to end, and waits for that.
    pub(super) async fn end_sub_agents(self: &Arc<Self>, parent: &Live) {
        for child in parent.children() {
            let mut phases = child.phases();
            // Waits for a creation in progress.
            phases.wait_for(|phase| *phase > Phase::Creating).await.ok();
            let reason = format!("its parent {} ended", parent.record.id);
            self.end(&child, "destroyed", &reason);
            child.ended().await.ok();
        }
    }

    /// Kills all that a sub-agent started, best effort: what is left ends with the parent's
    /// sandbox.
    pub(super) async fn end_inside(&self, child: &Arc<Live>, parent: &Arc<Live>) {
        let mut phases = parent.phases();
        let (paused, mut left) = (phases.clone(), END_WITHIN);
        let ended = tokio::select! {
            biased;
            () = left_active(&mut phases) => return,
            ended = within(&paused, &mut left, self.end_all_of(child, parent)) => ended,
        };
        if !matches!(ended, Some(Ok(()))) {
            let reason = ended.map_or_else(|| "it took too long".to_owned(), error_text);
            tracing::warn!(session = %child.record.id, reason, "processes of a sub-agent may run until its parent ends");
        }
    }

    async fn end_all_of(&self, child: &Arc<Live>, parent: &Arc<Live>) -> Result<(), Error> {
        for id in self.background.of(child) {
            let id = id.to_string();
            let end = request::Call::EndRun(EndRun { id: id.clone() });
            // Fails for a run that has ended.
            self.call_guest(parent, end).await.ok();
            let forget = request::Call::ForgetRun(ForgetRun { id });
            self.call_guest(parent, forget).await.ok();
        }
        for terminal in self.terminals.of(child) {
            let id = terminal.id.to_string();
            let end = request::Call::EndTerminal(EndTerminal { id, grace_ms: 0 });
            self.call_guest(parent, end).await.ok();
        }
        let env = Bytes::from(format!("{SESSION_VARIABLE}={}", child.record.id));
        let end = request::Call::EndProcesses(EndProcesses { env });
        self.call_guest(parent, end).await
    }

    async fn call_guest(&self, live: &Arc<Live>, call: request::Call) -> Result<(), Error> {
        let used = live.begin_anyway(Purpose::Lend, &self.recorder)?;
        let mut call = Call::start(used, call, "end a sub-agent".to_owned()).await?;
        call.reply().await.map(|_| ())
    }
}

fn error_text(ended: Result<(), Error>) -> String {
    ended
        .err()
        .map(|error| error.to_string())
        .unwrap_or_default()
}

/// Record of a sub-agent: its parent's, with its own id, times and working directory.
fn record(parent: &Session, spec: &SubAgentSpec) -> Session {
    let now = now_ms();
    Session {
        id: SessionId::of_sub_agent(&parent.id),
        origin: SessionOrigin::SubAgent,
        phase: Phase::Creating,
        reason: String::new(),
        sandbox: SandboxId::random(),
        // The parent's TTL ends it too.
        lifetime: Lifetime {
            ttl: None,
            ..parent.lifetime
        },
        created_at: now,
        last_used: now,
        sub_agent: Some(SubAgent {
            parent: parent.id.clone(),
            kind: spec.kind.clone(),
            cwd: spec.cwd(),
        }),
        ..parent.clone()
    }
}

/// Creates its directory, stores and activates it; on failure ends it.
async fn build(
    owned: Owned,
    parent: Arc<Live>,
    spec: SubAgentSpec,
    since: Instant,
) -> Result<Owned, Error> {
    let (shared, live) = (Arc::clone(owned.shared()), Arc::clone(owned.live()));
    let built = async {
        if let Some(path) = &spec.path {
            let used = parent.begin(Purpose::Lend, 0, &shared.recorder)?;
            let make = request::Call::MakeDir(MakeDir {
                root: workspace(),
                path: Bytes::copy_from_slice(path.as_bytes()),
                parents: true,
                mode: 0,
                user: String::new(),
            });
            let what = format!("make directory {}", spec.cwd());
            let mut call = Call::start(used, make, what).await?;
            call.reply().await?;
        }
        let active = Session {
            phase: Phase::Active,
            ..live.record.clone()
        };
        write_down(&shared, &active).await?;
        open(&shared, &live, Start::Shared)
    };
    let Err(error) = built.await else {
        metrics::created(live.record.runtime, Start::Shared, since.elapsed());
        return Ok(owned);
    };
    shared.end(&owned.keep(), "create_failed", &error.to_string());
    live.ended().await?;
    Err(error)
}
