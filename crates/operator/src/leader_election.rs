//! Leader election with a Lease: one of several operator replicas reconciles. The others are hot standbys: they watch,
//! and wait for the lease.

use crate::error::{Error, ErrorContext, Result};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{Api, ObjectMeta, PostParams};
use std::time::Duration;
use tokio::time::Instant;

/// Name of the Lease, the same as of the agent-sandbox controller: the two never reconcile at the same time.
const LEASE: &str = "a3317529.agent-sandbox.x-k8s.io";
/// Lease duration: another replica may take the lease when it was not renewed for this long.
const DURATION: Duration = Duration::from_secs(15);
/// Renew deadline: a leader that could not renew for this long stops, well before another may start.
const DEADLINE: Duration = Duration::from_secs(8);
/// Retry period of acquiring and renewing.
const RENEW: Duration = Duration::from_secs(2);
/// Timeout of one attempt to acquire the lease.
const ATTEMPT: Duration = Duration::from_secs(10);

pub(crate) struct LeaderElection {
    api: Api<Lease>,
    me: String,
}

/// The lease of another replica as last observed. Expiry is measured with our own clock: those of two machines may
/// differ.
struct Observed {
    version: Option<String>,
    since: Instant,
}

// === impl LeaderElection ===

impl LeaderElection {
    pub(crate) fn new(client: Client, namespace: &str, me: String) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            me,
        }
    }

    /// Returns when this process is the leader.
    pub(crate) async fn acquire(&self) {
        let mut observed: Option<Observed> = None;
        loop {
            let attempt = tokio::time::timeout(ATTEMPT, self.attempt(&mut observed)).await;
            match attempt {
                Ok(Ok(true)) => return,
                Ok(Ok(false)) => {}
                Err(_) => tracing::warn!("acquiring the lease timed out; trying again"),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "cannot acquire the lease; trying again")
                }
            }
            tokio::time::sleep(RENEW).await;
        }
    }

    /// Renews the lease. Returns when it is lost.
    pub(crate) async fn keep(&self) -> Error {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(RENEW).await;
            // The lease counts from the request, not from the response.
            let began = Instant::now();
            let attempt = tokio::time::timeout(RENEW, self.attempt(&mut None)).await;
            match attempt {
                Ok(Ok(true)) => renewed = began,
                Ok(Ok(false)) => return Error::NotLeader,
                Ok(Err(error)) => tracing::warn!(%error, "cannot renew the lease; trying again"),
                Err(_) => tracing::warn!("renewing the lease timed out; trying again"),
            }
            if renewed.elapsed() > DEADLINE {
                return Error::NotLeader;
            }
        }
    }

    /// Releases the lease, so that another replica can take over at once.
    pub(crate) async fn release(&self) {
        let Ok(Some(mut lease)) = self.api.get_opt(LEASE).await else {
            return;
        };
        if let Some(spec) = lease
            .spec
            .as_mut()
            .filter(|s| s.holder_identity.as_ref() == Some(&self.me))
        {
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            let _expires_otherwise = self
                .api
                .replace(LEASE, &PostParams::default(), &lease)
                .await;
        }
    }

    /// Acquires or renews the lease. Returns whether this process holds it now.
    async fn attempt(&self, observed: &mut Option<Observed>) -> Result<bool> {
        let now = MicroTime(Timestamp::now());
        let context = || format!("lease {LEASE}");
        let Some(mut lease) = self.api.get_opt(LEASE).await.with_context(context)? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(LEASE.to_owned()),
                    ..ObjectMeta::default()
                },
                spec: Some(self.spec(&now, now.clone(), 0)),
            };
            return won(self.api.create(&PostParams::default(), &lease).await);
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.unwrap_or_default();
        let transitions = spec.lease_transitions.unwrap_or(0);
        if holder == self.me {
            let acquired = spec.acquire_time.unwrap_or_else(|| now.clone());
            lease.spec = Some(self.spec(&now, acquired, transitions));
        } else if holder.is_empty() || expired(&lease, observed) {
            lease.spec = Some(self.spec(&now, now.clone(), transitions.saturating_add(1)));
        } else {
            return Ok(false);
        }
        won(self
            .api
            .replace(LEASE, &PostParams::default(), &lease)
            .await)
    }

    fn spec(&self, now: &MicroTime, acquired: MicroTime, transitions: i32) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.me.clone()),
            lease_duration_seconds: Some(15),
            acquire_time: Some(acquired),
            renew_time: Some(now.clone()),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }
}

/// Of two concurrent writers one gets a conflict (optimistic concurrency), which is not an error.
fn won(written: std::result::Result<Lease, kube::Error>) -> Result<bool> {
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error).with_context(|| format!("lease {LEASE}")),
    }
}

/// Whether the lease was not renewed while we observed it for its whole duration.
fn expired(lease: &Lease, observed: &mut Option<Observed>) -> bool {
    let version = lease.metadata.resource_version.clone();
    match observed {
        Some(seen) if seen.version == version => {
            let seconds = lease.spec.as_ref().and_then(|s| s.lease_duration_seconds);
            let duration = seconds
                .and_then(|s| u64::try_from(s).ok())
                .map_or(DURATION, Duration::from_secs);
            seen.since.elapsed() >= duration
        }
        _ => {
            *observed = Some(Observed {
                version,
                since: Instant::now(),
            });
            false
        }
    }
}
