//! The service itself: its state, and what every operation on sessions starts from.

mod create;
mod destroy;
mod egress;
mod expire;
mod get;
mod pause;
mod recover;
mod rest;
mod reuse;
mod runtimes;
mod sub_agent;
mod tenant;

pub use egress::FlowStream;
pub use get::{ListFilter, RuntimeStatus, ServerStatus, SessionView};

pub(crate) use create::{Owned, greet};
pub(crate) use destroy::remove;
pub(crate) use tenant::tenant_of;

use crate::approvals::Approvals;
use crate::exposures::Exposures;
use crate::keys::Keys;
use crate::live::Live;
use crate::metrics;
use crate::pool::{self, Pools};
use crate::recorder::{Recorder, now_ms};
use crate::run::Foreground;
use crate::runs::Background;
use crate::terminals::Terminals;
use crate::{Config, Error};
use k8e_driver::{Driver, Probe};
use k8e_model::{Principal, RuntimeKind, SandboxId, Session, SessionId, UnixMillis};
use k8e_store::Store;
use reuse::Reusable;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedRwLockWriteGuard, RwLock, Semaphore, watch};
use tokio::time::{Instant, timeout};

/// What shutdown waits for creations and destructions under way; recovery finishes what is left.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// The session service. Cheap to clone; the last clone's drop stops its background tasks.
#[derive(Clone)]
pub struct Sessions {
    pub(crate) shared: Arc<Shared>,
    _stop: Arc<StopOnDrop>,
}

pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(crate) recorder: Recorder,
    pub(crate) keys: Keys,
    drivers: Vec<Arc<dyn Driver>>,
    /// What each driver said last, so that no creation waits for a probe.
    probes: Mutex<Vec<Probe>>,
    pub(crate) pools: Pools,
    pub(crate) foreground: Foreground,
    pub(crate) background: Background,
    pub(crate) terminals: Terminals,
    pub(crate) approvals: Approvals,
    pub(crate) exposures: Exposures,
    /// Turns to make a sandbox.
    pub(crate) launches: Semaphore,
    started_at: UnixMillis,
    // Held for map operations only, never across an await: a std mutex is the fast one.
    index: Mutex<Index>,
    /// Wakes the expiry task when an earlier deadline was added.
    expiry: Notify,
    stop: watch::Sender<bool>,
    /// Read by creations and destructions under way, written by shutdown.
    pub(crate) work: Arc<RwLock<()>>,
    /// Held from shutdown on.
    closed: Mutex<Option<OwnedRwLockWriteGuard<()>>>,
    /// Held by who removes records of ended sessions.
    trimming: tokio::sync::Mutex<()>,
    /// A session ended since somebody began to trim.
    trim_again: std::sync::atomic::AtomicBool,
    /// To finish work from `drop`, where there may be no runtime to ask for.
    pub(crate) runtime: Handle,
}

/// Sessions that are not over.
#[derive(Default)]
struct Index {
    sessions: HashMap<SessionId, Arc<Live>>,
    /// Those that runs may use again.
    reusable: Reusable,
    /// When to look at a session; it may have been used since, then it is put back.
    deadlines: BTreeSet<(Instant, SessionId)>,
}

struct StopOnDrop(Arc<Shared>);

// === impl Sessions ===

impl Sessions {
    /// Recovers (adopts live sandboxes, ends dead ones, sweeps leftovers), then starts expiry and
    /// fills the pools.
    pub async fn start(
        config: Config,
        store: Store,
        drivers: Vec<Arc<dyn Driver>>,
    ) -> Result<Self, Error> {
        metrics::start(drivers.iter().map(|driver| driver.kind()));
        let probes: Vec<Probe> = drivers.iter().map(|driver| driver.probe()).collect();
        let shared = Arc::new(Shared {
            recorder: Recorder::start(store.clone()),
            keys: Keys::load(&store).await?,
            pools: Pools::new(&config, &drivers, &probes),
            foreground: Foreground::default(),
            background: Background::default(),
            terminals: Terminals::default(),
            approvals: Approvals::default(),
            exposures: Exposures::default(),
            launches: Semaphore::new(config.launches_max.max(1)),
            config,
            store,
            drivers,
            probes: Mutex::new(probes),
            started_at: now_ms(),
            index: Mutex::default(),
            expiry: Notify::new(),
            stop: watch::Sender::new(false),
            work: Arc::default(),
            closed: Mutex::default(),
            trimming: tokio::sync::Mutex::default(),
            trim_again: std::sync::atomic::AtomicBool::new(false),
            runtime: Handle::current(),
        });
        shared.recover().await?;
        shared.restore_terminals().await?;
        shared.restore_exposures().await?;
        shared.resume_runs().await?;
        tokio::spawn(expire::expire(Arc::clone(&shared)));
        tokio::spawn(rest::rest(Arc::clone(&shared)));
        tokio::spawn(runtimes::probe_again(Arc::clone(&shared)));
        pool::start(&shared);
        Ok(Self {
            _stop: Arc::new(StopOnDrop(Arc::clone(&shared))),
            shared,
        })
    }

    /// What the operator decided, for the doors to fill requests from.
    pub fn defaults(&self) -> &Config {
        &self.shared.config
    }

    /// The runtime that a `sandbox.v1` client gets that asks for this one. Another only where that
    /// is gVisor, it does not work here, and the operator allows it ([`Config::gvisor_fallback`]).
    pub fn runtime_or_fallback(&self, asked: Option<RuntimeKind>) -> Option<RuntimeKind> {
        let works = |kind| self.shared.works(kind);
        asked.filter(|kind| {
            *kind != RuntimeKind::Gvisor || !self.shared.config.gvisor_fallback || works(*kind)
        })
    }

    /// Ends runs whose callers wait for them, with their sessions where those were made for them, stops
    /// background tasks and empties the pools; sandboxes of other sessions stay alive and the next start
    /// finds them again.
    pub async fn shutdown(&self) {
        // Before the signal: a run that sees it must find its end recorded.
        self.shared.stop_foreground_runs();
        self.shared.stop.send_replace(true);
        // Kept: from now on nothing new begins.
        let closed = async {
            let closed = Arc::clone(&self.shared.work).write_owned();
            tokio::join!(closed, self.shared.pools.drain()).0
        };
        match timeout(SHUTDOWN_TIMEOUT, closed).await {
            Ok(closed) => {
                *self
                    .shared
                    .closed
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner) = Some(closed)
            }
            Err(_) => tracing::warn!(
                "sandboxes are still being made or removed: the next start cleans up after them"
            ),
        }
        self.shared.recorder.flush().await;
    }

    /// A session that can be used now.
    pub(crate) async fn live(&self, who: &Principal, id: &SessionId) -> Result<Arc<Live>, Error> {
        if let Some(live) = self.shared.find(who, id) {
            return Ok(live);
        }
        let record = self.recorded(who, id).await?;
        Err(Error::SessionOver {
            id: id.clone(),
            reason: record.reason,
        })
    }

    /// The sandbox of a session, live or over, that is the caller's to look at.
    pub(crate) async fn owned(&self, who: &Principal, id: &SessionId) -> Result<SandboxId, Error> {
        match self.shared.find(who, id) {
            Some(live) => Ok(live.record.sandbox.clone()),
            None => Ok(self.recorded(who, id).await?.sandbox),
        }
    }

    /// The record of one of the caller's.
    async fn recorded(&self, who: &Principal, id: &SessionId) -> Result<Session, Error> {
        let owner = (!who.is_operator()).then(|| who.name());
        let record = self.shared.store.session_of(id, owner).await?;
        record.ok_or_else(|| Error::SessionNotFound(id.clone()))
    }
}

// === impl Shared ===

impl Shared {
    /// A live session of the caller's.
    fn find(&self, who: &Principal, id: &SessionId) -> Option<Arc<Live>> {
        self.index()
            .sessions
            .get(id)
            .filter(|live| who.may_use(&live.record.owner))
            .cloned()
    }

    /// A live session, whoever's.
    pub(crate) fn find_any(&self, id: &SessionId) -> Option<Arc<Live>> {
        self.index().sessions.get(id).cloned()
    }

    /// Lets runs find a session if they may, gives it a deadline, and watches over its sandbox.
    fn publish(self: &Arc<Self>, live: &Arc<Live>) {
        {
            let mut index = self.index();
            index.offer(live);
            if let Some(at) = live.ends_at(Instant::now()) {
                index.schedule(live, at);
            }
            // Somebody ended it before it could be found: then it must not be.
            if live.phase().is_ending() {
                index.retire(live);
            }
        }
        self.expiry.notify_one();
        self.runtime
            .spawn(destroy::watch_over(Arc::clone(self), Arc::clone(live)));
    }

    fn driver(&self, kind: RuntimeKind) -> Option<&Arc<dyn Driver>> {
        self.drivers.iter().find(|driver| driver.kind() == kind)
    }

    fn probes(&self) -> MutexGuard<'_, Vec<Probe>> {
        self.probes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Each driver, and what it said last.
    pub(crate) fn probed(&self) -> Vec<(RuntimeKind, Probe)> {
        let kinds = self.drivers.iter().map(|driver| driver.kind());
        kinds.zip(self.probes().iter().cloned()).collect()
    }

    /// Looks at every session that is not over.
    pub(crate) fn each_live(&self, mut look: impl FnMut(&Live)) {
        for live in self.index().sessions.values() {
            look(live);
        }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True at shutdown.
    pub(crate) fn stop_signal(&self) -> watch::Receiver<bool> {
        self.stop.subscribe()
    }

    /// Resolves at shutdown.
    pub(crate) async fn stopped(&self) {
        // The sender is in self: it cannot be gone.
        self.stop.subscribe().wait_for(|stop| *stop).await.ok();
    }
}

// === impl Index ===

impl Index {
    /// Has it looked at then.
    fn schedule(&mut self, live: &Live, at: Instant) {
        self.unschedule(live);
        live.set_deadline(Some(at));
        self.deadlines.insert((at, live.record.id.clone()));
    }

    fn unschedule(&mut self, live: &Live) {
        if let Some(at) = live.set_deadline(None) {
            self.deadlines.remove(&(at, live.record.id.clone()));
        }
    }

    /// Its name is free again, if it still has it.
    fn remove(&mut self, live: &Arc<Live>) {
        let id = &live.record.id;
        let same = |other: &Arc<Live>| Arc::ptr_eq(other, live);
        if self.sessions.get(id).is_some_and(same) {
            self.sessions.remove(id);
        }
    }

    /// No run finds it any more, and its time does not matter.
    fn retire(&mut self, live: &Arc<Live>) {
        self.unschedule(live);
        self.withdraw(live);
    }
}

// === impl StopOnDrop ===

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop.send_replace(true);
    }
}
