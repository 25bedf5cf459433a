//! Status of a claim: its sandbox, its addresses and its conditions, in one write.

use super::Served;
use crate::cache::Key;
use crate::context::Context;
use crate::crd::conditions::{FINISHED, READY, Verdict, is_true};
use crate::crd::{BoundSandbox, Sandbox, SandboxClaim, SandboxClaimStatus};
use crate::error::Result;
use crate::metrics;
use crate::work_queue::Action;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

/// Writes the status if it changed, with the resourceVersion as precondition: of two writers that bound different
/// sandboxes, one gets a conflict.
pub(super) async fn write(
    ctx: &Context,
    claim: &SandboxClaim,
    served: Served,
    now: Timestamp,
) -> Result<Action> {
    let (status, next) = match &served {
        Served::By(sandbox) => (bound(claim, sandbox, now), Action::AwaitChange),
        Served::Not(verdict, next) => (unbound(claim, verdict.clone(), now), *next),
    };
    put(ctx, claim, &status).await?;
    if is_true(find(&status, READY))
        && let Served::By(sandbox) = &served
    {
        let key = Key::of(&claim.metadata);
        if let Some(seen) = ctx.timings.became_ready(&key) {
            metrics::claim_ready(ctx, claim, sandbox, &seen);
            ctx.queues.annotations.add(key);
        }
    }
    Ok(next)
}

/// Writes the `Ready` condition and keeps the bound sandbox and `Finished`.
pub(super) async fn write_keeping(
    ctx: &Context,
    claim: &SandboxClaim,
    verdict: Verdict,
    now: Timestamp,
) -> Result<()> {
    let mut status = unbound(claim, verdict, now);
    status.sandbox = claim.status.as_ref().and_then(|s| s.sandbox.clone());
    put(ctx, claim, &status).await
}

async fn put(ctx: &Context, claim: &SandboxClaim, status: &SandboxClaimStatus) -> Result<()> {
    let before = claim.status.clone().unwrap_or_default();
    if same(&before, status) {
        return Ok(());
    }
    let mut after = serde_json::to_value(status).unwrap_or_default();
    after["sandbox"] = match &status.sandbox {
        Some(sandbox) => json!({"name": sandbox.name, "podIPs": sandbox.pod_ips}),
        None => Value::Null,
    };
    let patch = json!({
        "metadata": {"resourceVersion": claim.metadata.resource_version},
        "status": after,
    });
    ctx.patch_claim_status(&Key::of(&claim.metadata), patch)
        .await?;
    Ok(())
}

fn bound(claim: &SandboxClaim, sandbox: &Sandbox, now: Timestamp) -> SandboxClaimStatus {
    let generation = claim.metadata.generation.unwrap_or_default();
    let verdict = ready(sandbox);
    let mut conditions =
        vec![verdict.condition(READY, generation, claim.condition(READY), &Time(now))];
    if let Some(finished) = sandbox.condition(FINISHED) {
        conditions.push(mirrored(finished, generation));
    }
    let pod_ips = sandbox.status.as_ref().and_then(|s| s.pod_ips.clone());
    SandboxClaimStatus {
        conditions: Some(conditions),
        sandbox: Some(BoundSandbox {
            name: sandbox.metadata.name.clone(),
            pod_ips,
        }),
    }
}

/// The `Ready` condition of the sandbox, as that of the claim.
fn ready(sandbox: &Sandbox) -> Verdict {
    let Some(condition) = sandbox.condition(READY) else {
        return Verdict::no("SandboxNotReady", "Sandbox is not ready");
    };
    if condition.reason == "SandboxExpired" {
        let message = "Underlying Sandbox resource has expired independently of the Claim.";
        return Verdict::no("SandboxExpired", message);
    }
    let verdict = match condition.status.as_str() {
        "True" => Verdict::yes,
        "False" => Verdict::no,
        _ => Verdict::unknown,
    };
    verdict(&condition.reason, condition.message.clone())
}

fn unbound(claim: &SandboxClaim, verdict: Verdict, now: Timestamp) -> SandboxClaimStatus {
    let generation = claim.metadata.generation.unwrap_or_default();
    let ready = verdict.condition(READY, generation, claim.condition(READY), &Time(now));
    let finished = claim.condition(FINISHED).map(|c| mirrored(c, generation));
    SandboxClaimStatus {
        conditions: Some([Some(ready), finished].into_iter().flatten().collect()),
        sandbox: None,
    }
}

fn mirrored(condition: &Condition, generation: i64) -> Condition {
    Condition {
        observed_generation: Some(generation),
        ..condition.clone()
    }
}

fn find<'a>(status: &'a SandboxClaimStatus, kind: &str) -> Option<&'a Condition> {
    status.conditions.as_ref()?.iter().find(|c| c.type_ == kind)
}

fn same(a: &SandboxClaimStatus, b: &SandboxClaimStatus) -> bool {
    a.sandbox == b.sandbox
        && [READY, FINISHED]
            .iter()
            .all(|kind| find(a, kind) == find(b, kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::SandboxSpec;

    #[test]
    fn a_sandbox_without_a_condition_is_not_ready() {
        let verdict = ready(&Sandbox::new("box", SandboxSpec::default()));
        let words = (
            verdict.status,
            verdict.reason.as_str(),
            verdict.message.as_str(),
        );
        assert_eq!(words, ("False", "SandboxNotReady", "Sandbox is not ready"));
    }
}
