//! Session creation: admission, record, sandbox launch, guest handshake, publication.
//!
//! With a warm sandbox of a pool, launch and handshake are done in advance, and the session is
//! recorded as active at once.
//!
//! The record is written before the sandbox is launched and names it, so a crash at any point
//! leaves nothing that recovery cannot find; a warm one that is not yet recorded is swept. The work runs in its own task: a caller that
//! disconnects interrupts nothing, and the session that it no longer wants is destroyed.

use super::destroy::remove;
use super::{Index, Sessions, Shared, tenant_of};
use crate::error::chain;
use crate::live::Live;
use crate::metrics::{self, Start};
use crate::pool::Claim;
use crate::recorder::now_ms;
use crate::{Error, SessionView};
use k8e_driver::{Driver, Sandbox, SandboxSpec};
use k8e_model::{
    Limits, Phase, Principal, Quantity, SandboxId, Session, SessionId, SessionOrigin, SessionSpec,
    Template, TenantId,
};
use k8e_store::StoreError;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedRwLockReadGuard, oneshot};
use tokio::time::{Instant, timeout};

/// Timeout of the guest handshake: a new guest answers in a millisecond, in a second under load.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Launch queue timeout: how long a creation waits for a launch slot.
const TURN_TIMEOUT: Duration = Duration::from_secs(60);

/// Where a session's sandbox comes from.
enum Source {
    /// Claimed from a warm pool.
    Warm(Claim),
    /// To be launched by this driver.
    Cold(Arc<dyn Driver>),
}

/// Drop guard of a new session: destroys it unless [`Owned::keep`] is called.
pub(crate) struct Owned {
    shared: Arc<Shared>,
    live: Option<Arc<Live>>,
}

// === impl Sessions ===

impl Sessions {
    /// Creates a session.
    ///
    /// Flow: admit → record as creating → launch → greet → record as active;
    /// with a warm sandbox: admit → record as active.
    /// Guarantees: on failure, or when the returned future is dropped, no sandbox and no live session are left.
    pub async fn create(&self, who: &Principal, spec: SessionSpec) -> Result<SessionView, Error> {
        let made = self.make(who, spec, SessionOrigin::Create).await?;
        let live = made.keep();
        Ok(self.view(&live))
    }

    /// Makes a session that is destroyed again unless it is kept.
    pub(crate) async fn make(
        &self,
        who: &Principal,
        spec: SessionSpec,
        origin: SessionOrigin,
    ) -> Result<Owned, Error> {
        let named = spec.id.as_ref().map(SessionId::as_str).unwrap_or_default();
        let mut audit = self.audited(who, "session.create", named);
        let made = self.make_unaudited(who, spec, origin).await;
        if let Ok(owned) = &made {
            audit.about(owned.live().record.id.as_str());
        }
        audit.end(made)
    }

    async fn make_unaudited(
        &self,
        who: &Principal,
        spec: SessionSpec,
        origin: SessionOrigin,
    ) -> Result<Owned, Error> {
        let since = Instant::now();
        let Ok(work) = Arc::clone(&self.shared.work).try_read_owned() else {
            return Err(Error::Stopping);
        };
        let admitted = self.shared.admit(who, spec, origin);
        let (owned, source) = admitted.map_err(metrics::refused)?;
        let (done, made) = oneshot::channel();
        self.shared.runtime.spawn(async move {
            // When the caller is gone, the result is dropped here and the session destroyed.
            done.send(build(owned, source, work, since).await).ok();
        });
        made.await.unwrap_or(Err(Error::Stopping))
    }
}

// === impl Shared ===

impl Shared {
    /// Admission control: checks the request, selects the driver, reserves a slot. Launches nothing.
    fn admit(
        self: &Arc<Self>,
        who: &Principal,
        spec: SessionSpec,
        origin: SessionOrigin,
    ) -> Result<(Owned, Source), Error> {
        let tenant = tenant_of(who, spec.tenant.as_ref())?.clone();
        self.check_template(&spec.template)?;
        let (template, image) = self.templates.resolve(&spec.template)?;
        let driver = self.choose(spec.runtime)?;
        let limits = spec.limits.or(self.config.limits);
        let limits = limits.map_err(|error| Error::Invalid(error.message))?;
        check_ceiling(&limits, &self.config.limits_max)?;
        let id = spec.id.unwrap_or_else(SessionId::random);
        // Checked before the claim: a refused request must not use up a warm sandbox.
        self.has_place(&self.index(), &id, who.name(), &tenant)?;
        let claimed = self.pools.claim(&template, driver.kind(), &limits);
        let now = now_ms();
        let record = Session {
            id,
            owner: who.name().to_owned(),
            tenant,
            origin,
            client: spec.client,
            phase: Phase::Creating,
            reason: String::new(),
            runtime: driver.kind(),
            sandbox: claimed
                .as_ref()
                .map_or_else(SandboxId::random, |claimed| claimed.id.clone()),
            template,
            env: spec.env,
            labels: spec.labels,
            limits,
            lifetime: spec.lifetime.or(self.config.lifetime),
            secrets: spec.secrets,
            egress: spec
                .egress
                .unwrap_or_else(|| self.config.egress_default.clone()),
            created_at: now,
            last_used: now,
            sub_agent: None,
            image,
        };
        let live = Arc::new(Live::new(record));
        let mut index = self.index();
        let record = &live.record;
        let placed = self.has_place(&index, &record.id, who.name(), &record.tenant);
        // It may have been deleted since: from here on, the session keeps it from being so.
        if let Err(error) = placed.and_then(|()| self.templates.still_has(&record.template)) {
            drop(index);
            // A concurrent creation took the slot.
            if let Some(claimed) = claimed {
                claimed.discard();
            }
            return Err(error);
        }
        index
            .sessions
            .insert(live.record.id.clone(), Arc::clone(&live));
        drop(index);
        let source = match claimed {
            Some(claimed) => {
                live.set_warm_sandbox(claimed.sandbox, claimed.gate);
                Source::Warm(claimed.claim)
            }
            None => Source::Cold(driver),
        };
        Ok((Owned::new(self, live), source))
    }

    /// Quota check: whether a session of that id, owner and tenant fits the session limits.
    pub(super) fn has_place(
        &self,
        index: &Index,
        id: &SessionId,
        owner: &str,
        tenant: &TenantId,
    ) -> Result<(), Error> {
        if index.sessions.contains_key(id) {
            return Err(Error::SessionExists(id.clone()));
        }
        let max = self.config.sessions_max;
        if index.sessions.len() >= max {
            return Err(Error::SessionsFull { max });
        }
        // Counted only where the limit can be reached: a claim is fast, and sessions may be many.
        let full = |max: usize, counts: &dyn Fn(&Session) -> bool| {
            let alive = index.sessions.values().filter(|live| counts(&live.record));
            max < index.sessions.len() + 1 && alive.count() >= max
        };
        let max = self.config.sessions_per_owner_max;
        if full(max, &|other| other.owner == owner) {
            return Err(Error::OwnerFull { max });
        }
        let max = self.config.sessions_per_tenant_max;
        if full(max, &|other| other.tenant == *tenant) {
            let tenant = tenant.clone();
            return Err(Error::TenantFull { tenant, max });
        }
        Ok(())
    }

    /// Whether this server makes sandboxes from a template.
    pub(super) fn check_template(&self, template: &Template) -> Result<(), Error> {
        match template {
            Template::Host if !self.config.host_template => Err(Error::HostTemplateOff),
            Template::Host | Template::Image { .. } => Ok(()),
        }
    }
}

// === impl Source ===

impl Source {
    fn start(&self) -> Start {
        match self {
            Self::Warm(_) => Start::Warm,
            Self::Cold(_) => Start::Cold,
        }
    }
}

// === impl Owned ===

impl Owned {
    pub(super) fn new(shared: &Arc<Shared>, live: Arc<Live>) -> Self {
        Self {
            shared: Arc::clone(shared),
            live: Some(live),
        }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn live(&self) -> &Arc<Live> {
        self.live
            .as_ref()
            .expect("it is taken only by keep, which consumes")
    }

    /// Disarms the guard: the session stays.
    pub(crate) fn keep(mut self) -> Arc<Live> {
        self.live.take().expect("it is taken only here, once")
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Some(live) = self.live.take() {
            self.shared.end(
                &live,
                "destroyed",
                "it was created for one call, which has ended",
            );
        }
    }
}

/// Checks requested limits against the server's maximum.
fn check_ceiling(asked: &Limits, max: &Limits) -> Result<(), Error> {
    let below = |quantity: Quantity, asked: u64, max: u64| {
        if asked <= max {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "{} limit of {} is above this server's maximum of {}: ask for less, or restart the server with a \
             higher --max-{}",
            quantity.noun(),
            quantity.text(asked),
            quantity.text(max),
            quantity.flag(),
        )))
    };
    let cpus = (u64::from(asked.cpu_millis), u64::from(max.cpu_millis));
    below(Quantity::Memory, asked.memory_bytes, max.memory_bytes)?;
    below(Quantity::Cpu, cpus.0, cpus.1)?;
    below(Quantity::Pids, asked.pids.into(), max.pids.into())?;
    below(Quantity::Disk, asked.disk_bytes, max.disk_bytes)
}

/// Builds the session; on failure rolls back and records the reason.
async fn build(
    owned: Owned,
    source: Source,
    work: OwnedRwLockReadGuard<()>,
    since: Instant,
) -> Result<Owned, Error> {
    let shared = Arc::clone(&owned.shared);
    let live = owned.live();
    let start = source.start();
    let built = match source {
        Source::Warm(claim) => warm(&shared, live, claim).await,
        Source::Cold(driver) => cold(&shared, live, driver).await,
    };
    if let Err(taken @ Error::SessionExists(_)) = built {
        let live = owned.keep();
        shared.forget(&live, &taken.to_string());
        if let Some(sandbox) = live.sandbox() {
            remove(sandbox)
                .await
                .map_err(|e| Error::Destroy(chain(&e)))?;
        }
        return Err(taken);
    }
    drop(work);
    let Err(error) = built.map_err(metrics::refused) else {
        metrics::created(live.record.runtime, start, since.elapsed());
        return Ok(owned);
    };
    Err(roll_back(owned, error).await)
}

/// Ends a session that could not be made, and records the reason; returns it.
pub(super) async fn roll_back(owned: Owned, error: Error) -> Error {
    let shared = Arc::clone(&owned.shared);
    let live = owned.keep();
    shared.end(&live, "create_failed", &error.to_string());
    match live.ended().await {
        Ok(()) => error,
        Err(cleanup) => Error::Destroy(format!("{error}; {cleanup}")),
    }
}

/// Creation with a warm sandbox: only the record and the egress policy are left to do.
async fn warm(shared: &Arc<Shared>, live: &Arc<Live>, claim: Claim) -> Result<(), Error> {
    let active = Session {
        phase: Phase::Active,
        ..live.record.clone()
    };
    write_down(shared, &active).await?;
    shared.apply_egress(live, &active.egress).await?;
    open(shared, live, Start::Warm)?;
    claim.served();
    Ok(())
}

async fn cold(
    shared: &Arc<Shared>,
    live: &Arc<Live>,
    driver: Arc<dyn Driver>,
) -> Result<(), Error> {
    launch(shared, live, Start::Cold, async |spec| {
        let sandbox = driver.launch(&spec).await.map_err(Error::Launch)?;
        Ok((sandbox, ()))
    })
    .await
}

/// Records a session, makes its sandbox with `make` when it is its turn, and opens it. Returns what `make` does.
pub(super) async fn launch<T>(
    shared: &Arc<Shared>,
    live: &Arc<Live>,
    start: Start,
    make: impl AsyncFnOnce(SandboxSpec) -> Result<(Box<dyn Sandbox>, T), Error>,
) -> Result<T, Error> {
    let record = &live.record;
    write_down(shared, record).await?;
    let spec = SandboxSpec {
        id: record.sandbox.clone(),
        template: record.template.clone(),
        layers: record
            .image
            .as_ref()
            .map_or_else(Vec::new, |image| image.layers.clone()),
        limits: record.limits,
    };
    let turn = timeout(TURN_TIMEOUT, shared.launches.acquire()).await;
    let turn = turn.map_err(|_| Error::LaunchesFull(TURN_TIMEOUT))?;
    let (sandbox, made) = make(spec).await?;
    let sandbox: Arc<dyn Sandbox> = sandbox.into();
    live.set_sandbox(Arc::clone(&sandbox));
    greet(sandbox.as_ref()).await?;
    drop(turn);
    shared.apply_egress(live, &record.egress).await?;
    shared
        .store
        .set_phase(&record.id, Phase::Active, "", now_ms())
        .await?;
    open(shared, live, start)?;
    Ok(made)
}

pub(super) async fn write_down(shared: &Shared, record: &Session) -> Result<(), Error> {
    shared.store.insert_session(record).await.map_err(|e| {
        if matches!(e, StoreError::Exists(_)) {
            Error::SessionExists(record.id.clone())
        } else {
            e.into()
        }
    })
}

/// Handshake with a new sandbox's guest, with a timeout.
pub(crate) async fn greet(sandbox: &dyn Sandbox) -> Result<(), Error> {
    match timeout(HELLO_TIMEOUT, sandbox.guest().hello()).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(e)) => Err(Error::Hello(chain(&e))),
        Err(_) => Err(Error::Hello(format!("no reply within {HELLO_TIMEOUT:?}"))),
    }
}

/// Activates a session: from here on it can be used.
pub(super) fn open(shared: &Arc<Shared>, live: &Arc<Live>, start: Start) -> Result<(), Error> {
    if !live.activate() {
        return Err(live.gone());
    }
    let record = &live.record;
    let (tenant, runtime) = (record.tenant.as_str(), record.runtime.as_str());
    shared.recorder.event(
        record,
        "created",
        json!({ "tenant": tenant, "runtime": runtime, "start": start.as_str() }),
    );
    shared.publish(live);
    Ok(())
}
