//! Status of sessions, runtimes, pools and the server; readiness.

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

/// Status of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionView {
    /// Its record with the current state.
    pub session: Session,
    /// Expiry time (TTL or idle timeout) if it is not used from now on; none is never.
    pub expires_at: Option<UnixMillis>,
    /// Counters of hit limits (OOM kills, refused forks).
    pub limit_events: LimitEvents,
    /// Summary of its egress policy for people; the rules are in its record.
    pub network: String,
    /// Number of running background runs.
    pub background_runs: usize,
}

/// Filter of a session list; none matches any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListFilter {
    /// Phase to match.
    pub phase: Option<Phase>,
    /// Tenant to match.
    pub tenant: Option<TenantId>,
}

/// Status of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerStatus {
    /// Version of this build.
    pub version: &'static str,
    /// Runtimes in the order of preference.
    pub runtimes: Vec<RuntimeStatus>,
    /// Default runtime (when the request sets none). While it is broken, such requests fail.
    pub default_runtime: Option<RuntimeKind>,
    /// Default resource limits (when the request sets none).
    pub limits: Limits,
    /// Live sessions.
    pub active: usize,
    /// Limit of live sessions.
    pub max: usize,
    /// Summary of the default egress policy, for people.
    pub network: String,
    /// Start time of the server.
    pub started_at: UnixMillis,
}

/// Status of a runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeStatus {
    /// The runtime.
    pub kind: RuntimeKind,
    /// Whether it works here.
    pub usable: bool,
    /// Why it is not usable, or which of its isolation features are missing here; may be empty.
    pub reason: String,
}

// === impl Sessions ===

impl Sessions {
    /// Status of the server: runtimes, limits and load. Probes the drivers, except broken ones.
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

    /// Readiness: whether a session with the default runtime could be created now, from the template `host` or,
    /// where that is off, from any. Uses cached probes, because readiness is polled often.
    pub async fn ready(&self) -> Result<(), Error> {
        self.shared.store.ping().await?;
        if self.shared.templates.is_empty() {
            self.shared.check_template(&Template::default())?;
        }
        self.shared.choose(None).map(drop)
    }

    /// Default egress policy (when the request sets none).
    pub fn egress_default(&self) -> EgressPolicy {
        self.shared.config.egress_default.clone()
    }

    /// The pools of warm sandboxes.
    pub fn pools(&self) -> Vec<PoolStatus> {
        self.shared.pools.status()
    }

    /// Status of a session; also after it ended, for the retention time.
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
        // Memory before the store: a session that ends meanwhile is seen twice rather than not at all.
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

    /// A record without a live session has ended, whatever phase was stored last.
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

/// Expiry time of a session. While it is paused only its TTL counts.
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
