//! Sub-agents: sessions of their own that live in the sandbox of another.
//!
//! A sub-agent has its own record, history, runs and terminals. Sandbox, network, limits and files
//! are its parent's, so its end is not a sandbox's: what it started is looked for and ended.

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

/// What a guest gets to end all that a sub-agent started: each part takes it a few seconds at most.
const END_WITHIN: Duration = Duration::from_secs(60);

// === impl Sessions ===

impl Sessions {
    /// Makes a sub-agent of a session.
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
            // Nobody there to take it: it comes back, is dropped, and so ended.
            done.send(build(owned, parent, spec, since).await).ok();
        });
        let live = made.await.unwrap_or(Err(Error::Stopping))?.keep();
        Ok(self.view(&live))
    }
}

// === impl Shared ===

impl Shared {
    /// Takes a place among the sessions, and among the parent's own.
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
            parent.adopt(&live)?;
            index.sessions.insert(id.clone(), Arc::clone(&live));
        }
        Ok(Owned::new(self, live))
    }

    /// Ends the sub-agents of a session that is about to end, and waits for that.
    pub(super) async fn end_sub_agents(self: &Arc<Self>, parent: &Live) {
        for child in parent.children() {
            let mut phases = child.phases();
            // One that is being made fails to be, or is made.
            phases.wait_for(|phase| *phase > Phase::Creating).await.ok();
            let reason = format!("its parent {} ended", parent.record.id);
            self.end(&child, "destroyed", &reason);
            child.ended().await.ok();
        }
    }

    /// Ends all that a sub-agent started, as far as its guest does; when its parent ends, so does
    /// everything.
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
            tracing::warn!(session = %child.record.id, reason, "processes of a sub-agent may live on until its parent ends");
        }
    }

    async fn end_all_of(&self, child: &Arc<Live>, parent: &Arc<Live>) -> Result<(), Error> {
        for id in self.background.of(child) {
            let id = id.to_string();
            let end = request::Call::EndRun(EndRun { id: id.clone() });
            // One that its guest does not know is over.
            self.tell_guest(parent, end).await.ok();
            let forget = request::Call::ForgetRun(ForgetRun { id });
            self.tell_guest(parent, forget).await.ok();
        }
        for terminal in self.terminals.of(child) {
            let id = terminal.id.to_string();
            let end = request::Call::EndTerminal(EndTerminal { id, grace_ms: 0 });
            self.tell_guest(parent, end).await.ok();
        }
        let env = Bytes::from(format!("{SESSION_VARIABLE}={}", child.record.id));
        let end = request::Call::EndProcesses(EndProcesses { env });
        self.tell_guest(parent, end).await
    }

    async fn tell_guest(&self, live: &Arc<Live>, call: request::Call) -> Result<(), Error> {
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

/// All but its name, its history and its place is its parent's.
fn record(parent: &Session, spec: &SubAgentSpec) -> Session {
    let now = now_ms();
    Session {
        id: SessionId::of_sub_agent(&parent.id),
        origin: SessionOrigin::SubAgent,
        phase: Phase::Creating,
        reason: String::new(),
        sandbox: SandboxId::random(),
        // Its parent's ttl ends it too.
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

/// Makes its directory, writes it down, and lets it be used; on failure it is over.
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
