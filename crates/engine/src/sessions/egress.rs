//! Egress policy of a live session: change, enforcement, and the flow log.

use super::{Sessions, Shared};
use crate::Error;
use crate::gate;
use crate::live::{Live, left_active};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use k8e_egress::Policy;
use k8e_model::{EgressPolicy, Flow, Principal, SessionId};
use serde_json::json;
use std::sync::Arc;

/// Stream of a session's egress flows, the oldest first.
pub struct FlowStream(BoxStream<'static, Flow>);

// === impl Sessions ===

impl Sessions {
    /// Replaces a session's egress policy; returns the new one.
    ///
    /// Flow: store → enforce. After a crash between the two, recovery enforces the stored policy.
    /// Guarantees: changes of one session are serialized, and one that was begun is
    /// finished, also when the returned future is dropped.
    pub async fn set_allowed_hosts(
        &self,
        who: &Principal,
        id: &SessionId,
        policy: EgressPolicy,
    ) -> Result<EgressPolicy, Error> {
        let audit = self.audited(who, "session.allow_hosts", id.as_str());
        audit.end(self.replace_policy(who, id, policy).await)
    }

    async fn replace_policy(
        &self,
        who: &Principal,
        id: &SessionId,
        policy: EgressPolicy,
    ) -> Result<EgressPolicy, Error> {
        let live = self.live(who, id).await?;
        if let Some(parent) = live.parent() {
            return Err(Error::SharedWithParent {
                id: id.clone(),
                parent: parent.record.id.clone(),
                what: "network",
            });
        }
        let Ok(work) = Arc::clone(&self.shared.work).try_read_owned() else {
            return Err(Error::Stopping);
        };
        let shared = Arc::clone(&self.shared);
        let change = self.shared.runtime.spawn(async move {
            let _work = work;
            shared.change_egress(&live, policy).await
        });
        change.await.unwrap_or(Err(Error::Stopping))
    }

    /// Egress flows of a session, allowed and denied: the retained ones, and with `follow` new
    /// ones, until the session ends or the server stops.
    pub async fn watch_egress(
        &self,
        who: &Principal,
        id: &SessionId,
        follow: bool,
    ) -> Result<FlowStream, Error> {
        let Some(live) = self.shared.find(who, id) else {
            self.recorded(who, id).await?;
            return Ok(FlowStream(stream::empty().boxed()));
        };
        let flows = flows(&live, follow);
        if !follow {
            return Ok(FlowStream(flows));
        }
        let (shared, mut phases) = (Arc::clone(&self.shared), live.phases());
        let over = async move {
            tokio::select! {
                () = left_active(&mut phases) => {}
                () = shared.stopped() => {}
            }
        };
        Ok(FlowStream(flows.take_until(Box::pin(over)).boxed()))
    }
}

// === impl FlowStream ===

impl FlowStream {
    /// The next flow; none at the end. Cancel safe.
    pub async fn next(&mut self) -> Option<Flow> {
        self.0.next().await
    }
}

// === impl Shared ===

impl Shared {
    async fn change_egress(
        &self,
        live: &Arc<Live>,
        policy: EgressPolicy,
    ) -> Result<EgressPolicy, Error> {
        let _turn = live.egress_turn().await;
        live.check_active()?;
        if !self.store.set_egress(&live.record.id, &policy).await? {
            return Err(live.gone());
        }
        // Not reusable until the policy that runs select by is enforced.
        self.index().withdraw(live);
        live.set_egress(policy.clone());
        self.apply_egress(live, &policy).await?;
        self.index().offer(live);
        let event = json!({ "allowed_hosts": policy.entries() });
        self.recorder
            .event(&live.record, "allowed_hosts_changed", event);
        Ok(policy)
    }

    /// Enforces a policy on a sandbox: before its session is active, and at each change.
    pub(super) async fn apply_egress(
        &self,
        live: &Live,
        policy: &EgressPolicy,
    ) -> Result<(), Error> {
        let gate = match (live.gate(), live.sandbox()) {
            (Some(gate), _) => Some(gate),
            (None, Some(sandbox)) => {
                gate::attach(self.config.gates.as_ref(), sandbox.as_ref()).await?
            }
            (None, None) => None,
        };
        // A sandbox without a network satisfies every policy.
        let Some(gate) = gate else {
            return Ok(());
        };
        gate.set_policy(Policy {
            allow: policy.clone(),
            deny: self.config.denied.to(&live.record.tenant),
            session: live.record.id.as_str().to_owned(),
        });
        live.set_gate(Some(gate));
        Ok(())
    }
}

/// Retained flows of a session, followed by new ones with `follow`.
fn flows(live: &Live, follow: bool) -> BoxStream<'static, Flow> {
    let Some(gate) = live.gate() else {
        // Without a network there are no flows.
        return match follow {
            true => stream::pending().boxed(),
            false => stream::empty().boxed(),
        };
    };
    let next = async |mut flows: k8e_egress::FlowStream| Some((flows.next().await?, flows));
    stream::unfold(gate.flows(follow), next).boxed()
}
