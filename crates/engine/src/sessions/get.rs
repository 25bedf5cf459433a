//! Looking at sessions and at the server.

use super::{Sessions, tenant_of};
use crate::Error;
use crate::PoolStatus;
use crate::live::Live;
use k8e_driver::Probe;
use k8e_model::{
    EgressPolicy, LimitEvents, Limits, Phase, Principal, RuntimeKind, Session, SessionId, Template,
    TenantId, UnixMillis,
};
use k8e_store::SessionQuery;
use std::collections::HashSet;

/// A session, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionView {
    /// Its record, as it is now.
    pub session: Session,
    /// When it ends if nobody uses it from now on; none is never.
    pub expires_at: Option<UnixMillis>,
    /// How often its limits were hit.
    pub limit_events: LimitEvents,
    /// What it can reach, in words; the rules are in its record.
    pub network: String,
    /// Background runs that are not over.
    pub background_runs: usize,
}

/// Which sessions to list; none is any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListFilter {
    /// In this phase.
    pub phase: Option<Phase>,
    /// Of this tenant.
    pub tenant: Option<TenantId>,
}

/// The server, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerStatus {
    /// Of this build.
    pub version: &'static str,
    /// In the order of preference.
    pub runtimes: Vec<RuntimeStatus>,
    /// What a session gets that asks for none. When it does not work now, none is made.
    pub default_runtime: Option<RuntimeKind>,
    /// Of a session that does not say.
    pub limits: Limits,
    /// Sessions that are not over.
    pub active: usize,
    /// How many may be.
    pub max: usize,
    /// What a sandbox can reach whose session does not say, in words.
    pub network: String,
    /// When this server started.
    pub started_at: UnixMillis,
}

/// A runtime, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeStatus {
    /// Which.
    pub kind: RuntimeKind,
    /// Whether it works here.
    pub usable: bool,
    /// Why not, or what is weaker than it could be here; may be empty.
    pub reason: String,
}

// === impl Sessions ===

impl Sessions {
    /// The server, its runtimes, limits and load. Asks the drivers anew that work or are not installed.
    pub fn status(&self) -> ServerStatus {
        let shared = &self.shared;
        let probed = shared.probe_all();
        let runtimes = probed.into_iter().map(|(kind, probe)| runtime(kind, probe));
        ServerStatus {
            version: env!("CARGO_PKG_VERSION"),
            runtimes: runtimes.collect(),
            default_runtime: shared.default_runtime(),
            limits: shared.config.limits,
            active: shared.index().sessions.len(),
            max: shared.config.sessions_max,
            network: shared.config.egress_default.in_words(),
            started_at: shared.started_at,
        }
    }

    /// Whether a session that asks for no runtime could be made now, or why not. Drivers are not asked anew: whoever asks
    /// this asks often.
    pub async fn ready(&self) -> Result<(), Error> {
        self.shared.store.ping().await?;
        self.shared.check_template(&Template::default())?;
        self.shared.choose(None).map(drop)
    }

    /// The pools of warm sandboxes.
    pub fn pools(&self) -> Vec<PoolStatus> {
        self.shared.pools.status()
    }

    /// A session, also for a while after it ended.
    pub async fn get(&self, who: &Principal, id: &SessionId) -> Result<SessionView, Error> {
        if let Some(live) = self.shared.find(who, id) {
            return Ok(self.view(&live));
        }
        Ok(self.view_ended(self.recorded(who, id).await?))
    }

    /// The caller's sessions, the newest first.
    pub async fn list(
        &self,
        who: &Principal,
        filter: ListFilter,
    ) -> Result<Vec<SessionView>, Error> {
        if let Some(tenant) = &filter.tenant {
            tenant_of(who, Some(tenant))?;
        }
        let wanted = |session: &Session| {
            who.may_use(&session.owner)
                && filter.phase.is_none_or(|phase| phase == session.phase)
                && filter
                    .tenant
                    .as_ref()
                    .is_none_or(|tenant| *tenant == session.tenant)
        };
        // Memory first: one that ends meanwhile is then seen twice rather than not at all.
        let live: Vec<_> = self.shared.index().sessions.values().cloned().collect();
        let mut views: Vec<_> = live
            .iter()
            .filter(|live| wanted(&live.snapshot()))
            .map(|live| self.view(live))
            .collect();
        if filter.phase.is_none_or(|phase| phase == Phase::Ended) {
            let owner = (!who.is_operator()).then(|| who.name().to_owned());
            let query = SessionQuery {
                owner,
                tenant: filter.tenant.clone(),
                phase: Some(Phase::Ended),
            };
            let seen: HashSet<_> = live.iter().map(|live| &live.record.id).collect();
            let ended = self.shared.store.sessions(&query).await?.into_iter();
            let unseen = ended.filter(|record| wanted(record) && !seen.contains(&record.id));
            views.extend(unseen.map(|record| self.view_ended(record)));
        }
        views.sort_by(|a, b| {
            (b.session.created_at, &a.session.id).cmp(&(a.session.created_at, &b.session.id))
        });
        Ok(views)
    }

    pub(crate) fn view(&self, live: &Live) -> SessionView {
        let session = live.snapshot();
        let above = live.parent().map(|parent| parent.snapshot());
        SessionView {
            // A sub-agent ends with its parent, too.
            expires_at: [Some(&session), above.as_ref()]
                .into_iter()
                .flatten()
                .filter_map(ends_at)
                .min(),
            limit_events: live.limit_events(),
            network: session.egress.in_words(),
            background_runs: live.background_runs(),
            session,
        }
    }

    /// A record without a live session is of one that is over, whatever could be written at its end.
    fn view_ended(&self, record: Session) -> SessionView {
        SessionView {
            expires_at: None,
            limit_events: LimitEvents::default(),
            network: EgressPolicy::None.in_words(),
            background_runs: 0,
            session: Session {
                phase: Phase::Ended,
                ..record
            },
        }
    }
}

/// While it is paused only its ttl counts.
fn ends_at(session: &Session) -> Option<UnixMillis> {
    let mut lifetime = session.lifetime;
    if session.phase == Phase::Paused {
        lifetime.idle = None;
    }
    lifetime.ends_at_ms(session.created_at, session.last_used)
}

fn runtime(kind: RuntimeKind, probe: Probe) -> RuntimeStatus {
    match probe {
        Probe::Usable { weaker } => RuntimeStatus {
            kind,
            usable: true,
            reason: weaker.join("; "),
        },
        Probe::Broken { reason } => RuntimeStatus {
            kind,
            usable: false,
            reason: format!("installed, but it does not work now: {reason}"),
        },
        Probe::Unusable { reason } => RuntimeStatus {
            kind,
            usable: false,
            reason,
        },
    }
}
