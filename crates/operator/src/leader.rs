//! Who of several operators works: the holder of a lease. The others know as much and wait.

use crate::error::{Context, Error, Result};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{Api, ObjectMeta, PostParams};
use std::time::Duration;
use tokio::time::Instant;

/// The lease that agent-sandbox controllers share; theirs and ours do not work at the same time.
const LEASE: &str = "a3317529.agent-sandbox.x-k8s.io";
/// How long a lease holds without being renewed.
const DURATION: Duration = Duration::from_secs(15);
/// A holder that could not renew for this long stops, well before another may begin.
const DEADLINE: Duration = Duration::from_secs(8);
const RENEW: Duration = Duration::from_secs(2);
/// How long one attempt may take.
const ATTEMPT: Duration = Duration::from_secs(10);

pub(crate) struct Leadership {
    api: Api<Lease>,
    me: String,
}

/// What was seen of a foreign lease, by our own clock: those of two machines may differ.
struct Foreign {
    version: Option<String>,
    since: Instant,
}

// === impl Leadership ===

impl Leadership {
    pub(crate) fn new(client: Client, namespace: &str, me: String) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            me,
        }
    }

    /// Returns when this process leads.
    pub(crate) async fn acquire(&self) {
        let mut foreign: Option<Foreign> = None;
        loop {
            let attempt = tokio::time::timeout(ATTEMPT, self.attempt(&mut foreign)).await;
            match attempt {
                Ok(Ok(true)) => return,
                Ok(Ok(false)) => {}
                Err(_) => tracing::warn!("nobody answered about the lease; trying again"),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "the lease could not be taken; trying again")
                }
            }
            tokio::time::sleep(RENEW).await;
        }
    }

    /// Renews the lease; returns when it is lost.
    pub(crate) async fn keep(&self) -> Error {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(RENEW).await;
            // It holds from when it was asked for, not from when the answer came.
            let began = Instant::now();
            let attempt = tokio::time::timeout(RENEW, self.attempt(&mut None)).await;
            match attempt {
                Ok(Ok(true)) => renewed = began,
                Ok(Ok(false)) => return Error::NotLeader,
                Ok(Err(error)) => tracing::warn!(%error, "the lease was not renewed; trying again"),
                Err(_) => tracing::warn!("the lease was not renewed in time; trying again"),
            }
            if renewed.elapsed() > DEADLINE {
                return Error::NotLeader;
            }
        }
    }

    /// Gives the lease up, so that another takes over at once.
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
            let _another_takes_it_later = self
                .api
                .replace(LEASE, &PostParams::default(), &lease)
                .await;
        }
    }

    /// Takes or renews the lease; whether it is ours now.
    async fn attempt(&self, foreign: &mut Option<Foreign>) -> Result<bool> {
        let now = MicroTime(Timestamp::now());
        let doing = || format!("lease {LEASE}");
        let Some(mut lease) = self.api.get_opt(LEASE).await.doing(doing)? else {
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
        } else if holder.is_empty() || expired(&lease, foreign) {
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

/// Of two who write at once one loses; that is no error.
fn won(written: std::result::Result<Lease, kube::Error>) -> Result<bool> {
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error).doing(|| format!("lease {LEASE}")),
    }
}

/// Whether nobody renewed the lease while we watched it for its whole duration.
fn expired(lease: &Lease, foreign: &mut Option<Foreign>) -> bool {
    let version = lease.metadata.resource_version.clone();
    match foreign {
        Some(seen) if seen.version == version => {
            let seconds = lease.spec.as_ref().and_then(|s| s.lease_duration_seconds);
            let duration = seconds
                .and_then(|s| u64::try_from(s).ok())
                .map_or(DURATION, Duration::from_secs);
            seen.since.elapsed() >= duration
        }
        _ => {
            *foreign = Some(Foreign {
                version,
                since: Instant::now(),
            });
            false
        }
    }
}
