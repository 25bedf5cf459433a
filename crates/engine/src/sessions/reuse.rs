//! Session selection for a run, background run or terminal that names no session: one that such a call of the
//! same principal, client kind and tenant made with the same options, or a new one.
//!
//! Everything that decides is in the session's record, so the choice is the same after a restart.

use super::{Index, Owned, Sessions, Shared, tenant_of};
use crate::Error;
use crate::live::Live;
use k8e_model::{
    ClientKind, EgressPolicy, Env, Labels, Lifetime, Limits, Phase, Principal, RuntimeKind,
    SecretRefs, Session, SessionId, SessionOrigin, SessionSpec, Template, TenantId,
};
use ring::digest;
use serde::Serialize;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// How often a session is selected when the one found turns out to have ended. Nothing is sent twice: the command had not
/// started. Retries of the call itself are in [`k8e_driver::GuestAddress::call`].
const TRIES: usize = 3;

/// Unused locks that are kept before they are cleared out.
const LOCKS_KEPT: usize = 64;

/// Reusable sessions by caller, and single-flight locks of creations in progress.
#[derive(Default)]
pub(super) struct Reusable {
    sessions: HashMap<Caller, Vec<(Options, Arc<Live>)>>,
    making: HashMap<(Caller, Options), Weak<tokio::sync::Mutex<()>>>,
}

/// First part of the reuse key: principal, client kind and tenant.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Caller {
    owner: String,
    client: ClientKind,
    tenant: TenantId,
}

/// A digest of all options of a session, the server's defaults filled in. Of equal options it is the
/// same, in whatever order they were given.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Options([u8; digest::SHA256_OUTPUT_LEN]);

/// What [`Options`] is a digest of.
#[derive(Serialize)]
struct Canonical<'a> {
    runtime: RuntimeKind,
    template: &'a Template,
    env: &'a Env,
    labels: &'a Labels,
    limits: &'a Limits,
    lifetime: &'a Lifetime,
    secrets: &'a SecretRefs,
    egress: Vec<String>,
}

/// Drop guard of a session whose first command has not started yet: dropped, it is destroyed,
/// unless another call uses it by then.
struct Unstarted {
    shared: Arc<Shared>,
    live: Option<Arc<Live>>,
}

// === impl Sessions ===

impl Sessions {
    /// The session that a run asking for `spec` would use now; none when it would make one.
    pub fn run_session(&self, who: &Principal, spec: &SessionSpec) -> Option<SessionId> {
        let (caller, options) = self.shared.reuse_key(who, spec)?;
        let live = self.shared.find_reusable(&caller, options, spec)?;
        Some(live.record.id.clone())
    }

    /// Starts something in the session for `spec`; returns whether the session is new. Of many callers
    /// at once, one creates it (single-flight). One whose first command does not start is destroyed.
    pub(crate) async fn start_in_run_session<T, F>(
        &self,
        who: &Principal,
        spec: &SessionSpec,
        start: impl Fn(Arc<Live>, bool) -> F,
    ) -> Result<(T, bool), Error>
    where
        F: Future<Output = Result<T, Error>> + Send,
    {
        let mut tries = 1;
        loop {
            let (live, unstarted) = self.choose_session(who, spec).await?;
            let created = unstarted.is_some();
            match start(live, created).await {
                // The session found has ended: select again.
                Err(Error::SessionEnded { .. }) if !created && tries < TRIES => tries += 1,
                started => {
                    let started = started?;
                    if let Some(unstarted) = unstarted {
                        unstarted.keep();
                    }
                    return Ok((started, created));
                }
            }
        }
    }

    async fn choose_session(
        &self,
        who: &Principal,
        spec: &SessionSpec,
    ) -> Result<(Arc<Live>, Option<Unstarted>), Error> {
        let shared = &self.shared;
        // Without a runtime there is no session either: creation returns the error.
        let key = shared.reuse_key(who, spec);
        let find = || {
            let (caller, options) = key.as_ref()?;
            shared.find_reusable(caller, *options, spec)
        };
        if let Some(live) = find() {
            return Ok((live, None));
        }
        let lock = key
            .as_ref()
            .map(|(caller, options)| shared.index().reusable.lock(caller, *options));
        let _making = match &lock {
            Some(lock) => Some(lock.lock().await),
            None => None,
        };
        if let Some(live) = find() {
            return Ok((live, None));
        }
        let owned = self.make(who, spec.clone(), SessionOrigin::Run).await?;
        let unstarted = Unstarted::new(owned);
        Ok((Arc::clone(unstarted.live()), Some(unstarted)))
    }
}

// === impl Shared ===

impl Shared {
    /// Reuse key of a session for `spec`; none where no runtime is installed, or for a tenant
    /// that the caller may not use.
    fn reuse_key(&self, who: &Principal, spec: &SessionSpec) -> Option<(Caller, Options)> {
        // Named one by one, so that a new option cannot be forgotten.
        let SessionSpec {
            id: _,
            tenant,
            client,
            runtime,
            template,
            env,
            labels,
            limits,
            lifetime,
            secrets,
            egress,
        } = spec;
        let caller = Caller {
            owner: who.name().to_owned(),
            client: client.clone(),
            // A tenant that the caller may not use: creation returns the error.
            tenant: tenant_of(who, tenant.as_ref()).ok()?.clone(),
        };
        // One that is not known: making a session says so.
        let (template, _) = self.templates.resolve(template).ok()?;
        let options = Options::new(Canonical {
            runtime: runtime.or_else(|| self.default_runtime())?,
            template: &template,
            env,
            labels,
            // Invalid limits: creation returns the error.
            limits: &limits.or(self.config.limits).ok()?,
            lifetime: &lifetime.or(self.config.lifetime),
            secrets,
            egress: entries(egress.as_ref().unwrap_or(&self.config.egress_default)),
        });
        Some((caller, options))
    }

    /// The newest active session under that key. Age is compared as records keep it: the order in which
    /// sessions were found again after a restart does not matter.
    fn find_reusable(
        &self,
        caller: &Caller,
        options: Options,
        spec: &SessionSpec,
    ) -> Option<Arc<Live>> {
        let fits = |(has, live): &&(Options, Arc<Live>)| {
            *has == options
                && live.phase() == Phase::Active
                && spec.id.as_ref().is_none_or(|id| *id == live.record.id)
        };
        let index = self.index();
        let candidates = index.reusable.sessions.get(caller)?.iter().filter(fits);
        let newest = candidates.max_by_key(|(_, live)| (live.record.created_at, &live.record.id));
        newest.map(|(_, live)| Arc::clone(live))
    }
}

// === impl Index ===

impl Index {
    /// Makes a session that a run created available for reuse, under its current options.
    pub(super) fn offer(&mut self, live: &Arc<Live>) {
        if live.record.origin != SessionOrigin::Run || live.phase().is_ending() {
            return;
        }
        let options = Options::of(&live.record, &live.egress());
        let caller = Caller::of(&live.record);
        let sessions = self.reusable.sessions.entry(caller).or_default();
        sessions.push((options, Arc::clone(live)));
    }

    /// Takes a session out of reuse.
    pub(super) fn withdraw(&mut self, live: &Live) {
        let caller = Caller::of(&live.record);
        let Some(sessions) = self.reusable.sessions.get_mut(&caller) else {
            return;
        };
        sessions.retain(|(_, other)| !std::ptr::eq(Arc::as_ptr(other), live));
        if sessions.is_empty() {
            self.reusable.sessions.remove(&caller);
        }
    }
}

// === impl Reusable ===

impl Reusable {
    /// Single-flight lock of a reuse key: held while a session is looked up and created.
    fn lock(&mut self, caller: &Caller, options: Options) -> Arc<tokio::sync::Mutex<()>> {
        if self.making.len() > LOCKS_KEPT {
            self.making.retain(|_, lock| lock.strong_count() > 0);
        }
        let held = self.making.entry((caller.clone(), options)).or_default();
        held.upgrade().unwrap_or_else(|| {
            let lock = Arc::default();
            *held = Arc::downgrade(&lock);
            lock
        })
    }
}

// === impl Caller ===

impl Caller {
    fn of(record: &Session) -> Self {
        Self {
            owner: record.owner.clone(),
            client: record.client.clone(),
            tenant: record.tenant.clone(),
        }
    }
}

// === impl Options ===

impl Options {
    /// Digest of a session's options with its current egress policy.
    fn of(record: &Session, egress: &EgressPolicy) -> Self {
        Self::new(Canonical {
            runtime: record.runtime,
            template: &record.template,
            env: &record.env,
            labels: &record.labels,
            limits: &record.limits,
            lifetime: &record.lifetime,
            secrets: &record.secrets,
            egress: entries(egress),
        })
    }

    fn new(canonical: Canonical<'_>) -> Self {
        let text = serde_json::to_vec(&canonical).expect("options have no keys but text");
        let mut bytes = [0; digest::SHA256_OUTPUT_LEN];
        bytes.copy_from_slice(digest::digest(&digest::SHA256, &text).as_ref());
        Self(bytes)
    }
}

// === impl Unstarted ===

impl Unstarted {
    fn new(owned: Owned) -> Self {
        Self {
            shared: Arc::clone(owned.shared()),
            live: Some(owned.keep()),
        }
    }

    fn live(&self) -> &Arc<Live> {
        self.live
            .as_ref()
            .expect("it is taken only by keep, which consumes")
    }

    /// Disarms the guard: the first command runs, the session stays.
    fn keep(mut self) {
        self.live = None;
    }
}

impl Drop for Unstarted {
    fn drop(&mut self) {
        if let Some(live) = self.live.take() {
            self.shared
                .end_unused(&live, "destroyed", "its first command did not start");
        }
    }
}

fn entries(egress: &EgressPolicy) -> Vec<String> {
    let mut entries = egress.entries();
    entries.sort();
    entries.dedup();
    entries
}
