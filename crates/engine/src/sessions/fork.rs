//! Forks: sessions that continue from the point at which another one is.
//!
//! Where the runtime can (gVisor), the sandbox is stopped for a moment, its memory and disk are copied, and every fork
//! is launched from that copy: all processes go on in the parent and in each fork, apart from each other. Otherwise a
//! fork is a new sandbox with a copy of the workspace. A saved session is forked from its saved state, and stays paused.
//!
//! Each fork is recorded before it is launched, like any session; a copied state has the id of no sandbox. So a crash
//! at any point leaves nothing that recovery does not end or sweep, and the parent is not touched by it.

use super::create::{launch, roll_back};
use super::{Owned, Sessions, Shared, tenant_of};
use crate::error::chain;
use crate::live::{Live, Purpose};
use crate::metrics::{self, Start};
use crate::recorder::now_ms;
use crate::{Error, SessionView};
use futures::future::join_all;
use k8e_driver::{Driver, DriverError, Restored, Sandbox};
use k8e_model::{
    ClientKind, Env, ForkSpec, Lifetime, Phase, Principal, SandboxId, Session, SessionId,
    SessionOrigin,
};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Result of a fork.
#[derive(Debug)]
pub struct ForkedSessions {
    /// How long the processes of the parent were stopped.
    pub stopped: Duration,
    /// The forks, as many as were asked for.
    pub sessions: Vec<ForkedSession>,
}

/// One fork.
#[derive(Debug)]
pub struct ForkedSession {
    /// Its id, also of one that failed.
    pub id: SessionId,
    /// The session and what it has of its parent's memory, or why it could not be made: nothing of it is left then.
    pub made: Result<(SessionView, ForkMemory), Error>,
}

/// What a fork has of its parent's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForkMemory {
    /// All of it: its processes go on.
    Copied,
    /// None: it has the files of the workspace, and no process runs.
    None {
        /// Why.
        reason: String,
    },
}

/// What forks are made from.
enum Point {
    /// A state on disk.
    State {
        id: SandboxId,
        /// It was made for the fork and goes with it; otherwise it is that of the paused parent.
        copied: bool,
        stopped: Duration,
    },
    /// The files of the running parent.
    Files { reason: String },
}

/// Forks that were made or not, in the order of their ids.
type Made = Vec<Result<(Owned, ForkMemory), Error>>;

// === impl Sessions ===

impl Sessions {
    /// Makes sessions that continue from the point at which a session is: same owner, tenant, labels, limits, egress
    /// policy and lifetime, which begins anew. Sub-agents, background runs, terminals and exposed services of the parent
    /// are its own; their processes go on in a fork with memory, unlisted.
    ///
    /// New calls to the parent wait while it is copied. Refused while streams of it are open (commands, terminals,
    /// connections), after a wait of two seconds; background runs are none. Each fork can fail by itself; when this
    /// fails, or the returned future is dropped, no fork is left. The parent goes on in any case.
    pub async fn fork(
        &self,
        who: &Principal,
        id: &SessionId,
        spec: ForkSpec,
    ) -> Result<ForkedSessions, Error> {
        let audit = self.audited(who, "session.fork", id.as_str());
        audit.end(self.fork_unaudited(who, id, spec).await)
    }

    async fn fork_unaudited(
        &self,
        who: &Principal,
        id: &SessionId,
        spec: ForkSpec,
    ) -> Result<ForkedSessions, Error> {
        let since = Instant::now();
        let parent = self.live(who, id).await?;
        if let Some(above) = parent.parent() {
            return Err(Error::SharedWithParent {
                id: id.clone(),
                parent: above.record.id.clone(),
                what: "sandbox",
            });
        }
        tenant_of(who, Some(&parent.record.tenant))?;
        let Ok(work) = Arc::clone(&self.shared.work).try_read_owned() else {
            return Err(Error::Stopping);
        };
        let shared = &self.shared;
        let driver = shared
            .driver(parent.record.runtime)
            .ok_or(Error::Stopping)?;
        let forks = shared
            .admit_forks(&parent, spec)
            .map_err(metrics::refused)?;
        let ids: Vec<_> = forks
            .iter()
            .map(|fork| fork.live().record.id.clone())
            .collect();
        let (done, made) = oneshot::channel();
        let fork = fork(Arc::clone(shared), Arc::clone(driver), parent, forks, since);
        shared.runtime.spawn(async move {
            let _work = work;
            // When the caller is gone, the result is dropped here and the forks destroyed.
            done.send(fork.await).ok();
        });
        let (stopped, made) = made.await.unwrap_or(Err(Error::Stopping))?;
        let view = |made: Result<(Owned, ForkMemory), Error>| {
            made.map(|(owned, memory)| (self.view(&owned.keep()), memory))
        };
        let sessions = ids.into_iter().zip(made).map(|(id, made)| ForkedSession {
            id,
            made: view(made),
        });
        Ok(ForkedSessions {
            stopped,
            sessions: sessions.collect(),
        })
    }
}

// === impl Shared ===

impl Shared {
    /// Admission control: reserves slots for all forks or for none.
    fn admit_forks(
        self: &Arc<Self>,
        parent: &Arc<Live>,
        spec: ForkSpec,
    ) -> Result<Vec<Owned>, Error> {
        let from = parent.snapshot();
        match from.phase {
            Phase::Creating => return Err(Error::SessionNotReady(from.id)),
            Phase::Active | Phase::Paused => {}
            Phase::Terminating | Phase::Ended => return Err(parent.gone()),
        }
        let mut index = self.index();
        let mut forks: Vec<Arc<Live>> = Vec::new();
        for _ in 0..spec.count.get() {
            let fork = Arc::new(Live::new(record(&from, spec)));
            let id = fork.record.id.clone();
            if let Err(error) = self.has_place(&index, &id, &from.owner, &from.tenant) {
                for fork in &forks {
                    index.remove(fork);
                }
                return Err(error);
            }
            index.sessions.insert(id, Arc::clone(&fork));
            forks.push(fork);
        }
        drop(index);
        Ok(forks
            .into_iter()
            .map(|fork| Owned::new(self, fork))
            .collect())
    }

    /// What the session is forked from: its state on disk, copied if it runs. Its pause is locked by the caller.
    async fn fork_point(&self, parent: &Arc<Live>) -> Result<Point, Error> {
        let Some(sandbox) = parent.sandbox() else {
            return Err(Error::SessionNotReady(parent.record.id.clone()));
        };
        if parent.phase() == Phase::Paused {
            return match sandbox.is_saved() {
                true => Ok(Point::State {
                    id: parent.record.sandbox.clone(),
                    copied: false,
                    stopped: Duration::ZERO,
                }),
                false => Err(Error::ForkFrozen(parent.record.id.clone())),
            };
        }
        // Wakes it from an idle stop, and keeps it awake.
        let _used = parent.begin(Purpose::Call, 0, &self.recorder)?;
        if !sandbox.can_copy_state() {
            let reason = "only gVisor sessions can be forked with their memory";
            return Ok(Point::Files {
                reason: reason.to_owned(),
            });
        }
        match self.copy_state(parent, sandbox.as_ref()).await {
            Ok((id, stopped)) => Ok(Point::State {
                id,
                copied: true,
                stopped,
            }),
            Err(DriverError::InUse(why)) => Err(Error::ForkBusy {
                id: parent.record.id.clone(),
                why,
            }),
            Err(full @ DriverError::Exhausted(_)) => Err(Error::Launch(full)),
            Err(error) => Ok(Point::Files {
                reason: chain(&error),
            }),
        }
    }

    /// Copies a running sandbox; calls to it wait meanwhile.
    async fn copy_state(
        &self,
        parent: &Live,
        sandbox: &dyn Sandbox,
    ) -> Result<(SandboxId, Duration), DriverError> {
        let held = parent.hold_calls().await;
        parent.set_detached(true);
        let state = SandboxId::random();
        let copied = sandbox.copy_state(&state).await;
        parent.set_detached(false);
        drop(held);
        copied.map(|stopped| (state, stopped))
    }
}

/// Makes the forks; how long the parent was stopped.
async fn fork(
    shared: Arc<Shared>,
    driver: Arc<dyn Driver>,
    parent: Arc<Live>,
    forks: Vec<Owned>,
    since: Instant,
) -> Result<(Duration, Made), Error> {
    // A saved session must stay so until its forks are launched.
    let turn = parent.pause_turn().await;
    let point = match shared.fork_point(&parent).await {
        Ok(point) => point,
        Err(error) => {
            for fork in forks {
                // It has no record yet.
                shared.forget(&fork.keep(), &error.to_string());
            }
            return Err(error);
        }
    };
    let (stopped, made) = match &point {
        Point::State {
            id,
            copied,
            stopped,
        } => {
            let turn = (!copied).then_some(turn);
            let launches = forks
                .into_iter()
                .map(|fork| from_state(&shared, &driver, fork, id));
            let made = join_all(launches).await;
            drop(turn);
            if *copied && let Err(error) = driver.remove_state(id).await {
                tracing::warn!(session = %parent.record.id, error = chain(&error), "the copied state of a fork cannot be removed, the next start of the server does it");
            }
            (*stopped, made)
        }
        Point::Files { reason } => {
            drop(turn);
            from_files(&shared, &driver, &parent, forks, reason).await?
        }
    };
    for (fork, memory) in made.iter().flatten() {
        let record = &fork.live().record;
        metrics::created(record.runtime, Start::Fork, since.elapsed());
        let mut detail = json!({ "parent": parent.record.id.as_str(), "memory": memory.as_str() });
        if let ForkMemory::None { reason } = memory {
            detail["reason"] = json!(reason);
        }
        shared.recorder.event(record, "forked_from", detail);
    }
    let detail = json!({
        "forks": made.iter().flatten().count(),
        "failed": made.iter().filter(|made| made.is_err()).count(),
        "stopped_ms": u64::try_from(stopped.as_millis()).unwrap_or(u64::MAX),
    });
    shared.recorder.event(&parent.record, "forked", detail);
    Ok((stopped, made))
}

/// A fork with the memory of its parent, as far as that can be used.
async fn from_state(
    shared: &Arc<Shared>,
    driver: &Arc<dyn Driver>,
    fork: Owned,
    state: &SandboxId,
) -> Result<(Owned, ForkMemory), Error> {
    let launched = launch(shared, fork.live(), Start::Fork, async |spec| {
        let launched = driver.launch_from(&spec, state).await;
        launched.map_err(Error::Launch)
    });
    match launched.await {
        Ok(Restored::Memory) => Ok((fork, ForkMemory::Copied)),
        Ok(Restored::Files { reason }) => Ok((fork, ForkMemory::None { reason })),
        Err(error) => Err(roll_back(fork, metrics::refused(error)).await),
    }
}

/// Forks that are new sandboxes, with copies of the parent's workspace.
async fn from_files(
    shared: &Arc<Shared>,
    driver: &Arc<dyn Driver>,
    parent: &Arc<Live>,
    forks: Vec<Owned>,
    reason: &str,
) -> Result<(Duration, Made), Error> {
    let launches = forks.into_iter().map(|fork| async move {
        let launched = launch(shared, fork.live(), Start::Fork, async |spec| {
            let sandbox = driver.launch(&spec).await.map_err(Error::Launch)?;
            Ok((sandbox, ()))
        });
        match launched.await {
            Ok(()) => Ok(fork),
            Err(error) => Err(roll_back(fork, metrics::refused(error)).await),
        }
    });
    let launched = join_all(launches).await;
    let to: Vec<&Arc<Live>> = launched.iter().flatten().map(Owned::live).collect();
    if to.is_empty() {
        let failed = launched
            .into_iter()
            .map(|fork| fork.map(|fork| (fork, none(reason))));
        return Ok((Duration::ZERO, failed.collect()));
    }
    let copied = shared.copy_workspace(parent, &to).await;
    let (stopped, copied) = match copied {
        Ok(copied) => copied,
        Err(error) => {
            let text = error.to_string();
            for fork in launched.into_iter().flatten() {
                roll_back(fork, Error::Invalid(text.clone())).await;
            }
            return Err(error);
        }
    };
    let mut copied = copied.into_iter();
    let mut made = Vec::new();
    for fork in launched {
        made.push(match (fork, &mut copied) {
            (Err(error), _) => Err(error),
            (Ok(fork), copied) => match copied.next() {
                Some(Ok(())) => Ok((fork, none(reason))),
                Some(Err(error)) => Err(roll_back(fork, error).await),
                None => Err(roll_back(fork, Error::Stopping).await),
            },
        });
    }
    Ok((stopped, made))
}

fn none(reason: &str) -> ForkMemory {
    ForkMemory::None {
        reason: reason.to_owned(),
    }
}

/// The record of a fork. Its lifetime begins now.
fn record(from: &Session, spec: ForkSpec) -> Session {
    let now = now_ms();
    let id = match from.client == ClientKind::e2b() {
        true => SessionId::random_e2b(),
        false => SessionId::random(),
    };
    Session {
        env: own_env(&from.env, &from.id, &id),
        id,
        lifetime: Lifetime {
            ttl: spec.ttl.or(from.lifetime.ttl),
            ..from.lifetime
        },
        sandbox: SandboxId::random(),
        origin: SessionOrigin::Create,
        phase: Phase::Creating,
        reason: String::new(),
        created_at: now,
        last_used: now,
        sub_agent: None,
        ..from.clone()
    }
}

/// The environment of a fork: a variable that holds the id of the session (E2B's clients have one) holds its own.
fn own_env(env: &Env, from: &SessionId, id: &SessionId) -> Env {
    let own = |value: &str| match value == from.as_str() {
        true => id.to_string(),
        false => value.to_owned(),
    };
    let vars: BTreeMap<String, String> = env
        .iter()
        .map(|(name, value)| (name.to_owned(), own(value)))
        .collect();
    // Only an id that is longer than the parent's could make it too large.
    vars.try_into().unwrap_or_else(|_| env.clone())
}

// === impl ForkMemory ===

impl ForkMemory {
    /// As it is written in answers and events.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Copied => "copied",
            Self::None { .. } => "none",
        }
    }
}
