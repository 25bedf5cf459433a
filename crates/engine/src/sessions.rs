//! The session service: shared state, start, graceful shutdown, lookup of live sessions.

mod create;
mod destroy;
mod egress;
mod expire;
mod fork;
mod get;
mod idle_stop;
mod lifetime;
mod pause;
mod recover;
mod reuse;
mod runtimes;
mod sub_agent;
mod tenant;

pub use egress::FlowStream;
pub use fork::{ForkMemory, ForkedSession, ForkedSessions};
pub use get::{ListFilter, RuntimeStatus, ServerStatus, SessionView};

pub(crate) use create::{Owned, greet};
pub(crate) use destroy::remove;
pub(crate) use tenant::tenant_of;

use crate::access_tokens::AccessTokens;
use crate::approvals::Approvals;
use crate::background::Background;
use crate::commands::Commands;
use crate::exposures::Exposures;
use crate::keys::Keys;
use crate::live::Live;
use crate::metrics;
use crate::pool::{self, Pools};
use crate::recorder::{Recorder, now_ms};
use crate::run::Foreground;
use crate::snapshots::Snapshots;
use crate::templates::Templates;
use crate::terminals::Terminals;
use crate::{Config, Error, templates};
use k8e_driver::{Driver, Probe};
use k8e_model::{Digest, Principal, RuntimeKind, SandboxId, Session, SessionId, UnixMillis};
use k8e_store::Store;
use reuse::Reusable;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedRwLockWriteGuard, RwLock, Semaphore, watch};
use tokio::time::{Instant, timeout};

/// Graceful shutdown timeout for creations and destructions in progress; crash recovery finishes the rest.
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
    /// Last probe result of each driver, cached: no creation waits for a probe.
    probes: Mutex<Vec<Probe>>,
    pub(crate) pools: Pools,
    pub(crate) foreground: Foreground,
    pub(crate) background: Background,
    pub(crate) terminals: Terminals,
    pub(crate) commands: Commands,
    pub(crate) access_tokens: AccessTokens,
    pub(crate) approvals: Approvals,
    pub(crate) exposures: Exposures,
    pub(crate) templates: Templates,
    pub(crate) snapshots: Snapshots,
    /// Turns to make a sandbox.
    pub(crate) launches: Semaphore,
    started_at: UnixMillis,
    // Held for map operations only, never across an await: a std mutex is the fast one.
    index: Mutex<Index>,
    /// Wakes the expiry task when an earlier deadline was added.
    expiry: Notify,
    stop: watch::Sender<bool>,
    /// Read-locked by creations and destructions in progress, write-locked by shutdown, which waits for them.
    pub(crate) work: Arc<RwLock<()>>,
    /// Write guard of `work`, held from shutdown on.
    closed: Mutex<Option<OwnedRwLockWriteGuard<()>>>,
    /// Single-flight lock of retention: removal of records of ended sessions.
    trimming: tokio::sync::Mutex<()>,
    /// Dirty flag of retention: a session ended since the last pass began.
    trim_again: std::sync::atomic::AtomicBool,
    /// Tokio runtime, to spawn tasks from `drop`, where there may be no current one.
    pub(crate) runtime: Handle,
}

/// Index of live sessions.
#[derive(Default)]
struct Index {
    sessions: HashMap<SessionId, Arc<Live>>,
    /// Sessions that later runs may reuse.
    reusable: Reusable,
    /// Expiry deadlines. A session used since its deadline was set is rescheduled when it comes up.
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
            commands: Commands::default(),
            access_tokens: AccessTokens::load(&store).await?,
            approvals: Approvals::default(),
            exposures: Exposures::default(),
            templates: Templates::load(&store).await?,
            snapshots: Snapshots::new(&store),
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
        tokio::spawn(idle_stop::idle_stop(Arc::clone(&shared)));
        tokio::spawn(runtimes::probe_again(Arc::clone(&shared)));
        tokio::spawn(templates::collect(Arc::clone(&shared)));
        tokio::spawn(crate::snapshots::sweep(Arc::clone(&shared)));
        pool::start(&shared);
        Ok(Self {
            _stop: Arc::new(StopOnDrop(Arc::clone(&shared))),
            shared,
        })
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
        // The guard is held from now on: no new work begins.
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
                "shutdown timeout: sandboxes are still being made or removed, the next start cleans up after them"
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

    /// The stored record of one of the caller's sessions.
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

    /// A live session of any owner.
    pub(crate) fn find_any(&self, id: &SessionId) -> Option<Arc<Live>> {
        self.index().sessions.get(id).cloned()
    }

    /// Makes a session available for reuse, schedules its expiry, and watches its sandbox for death.
    fn publish(self: &Arc<Self>, live: &Arc<Live>) {
        {
            let mut index = self.index();
            index.offer(live);
            if let Some(at) = live.ends_at(Instant::now()) {
                index.schedule(live, at);
            }
            // It was ended before it was published: take it out again.
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

    /// Each driver's kind with its last probe result.
    pub(crate) fn probed(&self) -> Vec<(RuntimeKind, Probe)> {
        let kinds = self.drivers.iter().map(|driver| driver.kind());
        kinds.zip(self.probes().iter().cloned()).collect()
    }

    /// Calls `look` with every live session.
    pub(crate) fn each_live(&self, mut look: impl FnMut(&Live)) {
        for live in self.index().sessions.values() {
            look(live);
        }
    }

    /// Sessions that are not over and stand on an image.
    pub(crate) fn sessions_of_image(&self, digest: &Digest) -> usize {
        let sessions = self.index();
        let images = sessions
            .sessions
            .values()
            .filter_map(|live| live.record.image.as_ref());
        images.filter(|image| image.digest == *digest).count()
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
    /// Sets the session's expiry deadline, in place of an earlier one.
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

    /// Removes a session from the index, unless its id belongs to a newer session already.
    fn remove(&mut self, live: &Arc<Live>) {
        let id = &live.record.id;
        let same = |other: &Arc<Live>| Arc::ptr_eq(other, live);
        if self.sessions.get(id).is_some_and(same) {
            self.sessions.remove(id);
        }
    }

    /// Takes a session out of expiry and reuse.
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
