//! Status of a Sandbox: computed from its children by a pure function, and written only when it changed.

use super::{Children, Pods, ServiceState, error_verdict};
use crate::cache::Key;
use crate::caches::PodView;
use crate::context::Context;
use crate::crd::conditions::{FINISHED, POD_SCHEDULED, READY, SUSPENDED, Verdict, is_true};
use crate::crd::names::{self, NAME_HASH};
use crate::crd::{OperatingMode, Sandbox, SandboxStatus};
use crate::error::Result;
use crate::events::Event;
use crate::metrics;
use crate::object_meta::controller_of;
use crate::work_queue::Action;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::time::Duration;

/// Debounce window for the status of a pooled sandbox that is not ready yet.
const STATUS_DEBOUNCE: Duration = Duration::from_secs(2);

/// Writes the status if it changed.
pub(super) async fn write(
    ctx: &Context,
    sandbox: &Sandbox,
    children: &Children,
    now: Timestamp,
) -> Result<Action> {
    let status = compute(sandbox, children, &ctx.options.cluster_domain, now);
    let before = sandbox.status.clone().unwrap_or_default();
    if same(&before, &status) {
        return Ok(Action::AwaitChange);
    }
    let key = Key::of(&sandbox.metadata);
    if may_wait(sandbox, &before, &status)
        && let Some(wait) = ctx.sandbox_status_debounce.delay(&key, STATUS_DEBOUNCE)
    {
        return Ok(Action::RequeueAfter(wait));
    }
    ctx.sandbox_status_debounce.clear(&key);
    ctx.patch_sandbox_status(&key, patch(&before, &status))
        .await?;
    report(ctx, sandbox, &before, &status, children);
    Ok(Action::AwaitChange)
}

/// Whether a status may be debounced: a pooled sandbox that was not ready and still is not.
fn may_wait(sandbox: &Sandbox, before: &SandboxStatus, after: &SandboxStatus) -> bool {
    let pooled = controller_of(&sandbox.metadata).is_some_and(|o| o.kind == "SandboxWarmPool");
    let unready =
        |status: &SandboxStatus| !is_true(find(status, READY)) && find(status, FINISHED).is_none();
    pooled && unready(before) && unready(after)
}

/// The merge patch from one status to another. Conditions are written as a whole; missing fields are removed.
pub(super) fn patch(before: &SandboxStatus, after: &SandboxStatus) -> Value {
    let before = serde_json::to_value(before).unwrap_or_default();
    let mut after = serde_json::to_value(after).unwrap_or_default();
    if let (Some(before), Some(after)) = (before.as_object(), after.as_object_mut()) {
        for key in before.keys() {
            after.entry(key.clone()).or_insert(Value::Null);
        }
    }
    json!({"status": after})
}

/// Whether two statuses are equal, regardless of the order of their conditions.
pub(super) fn same(a: &SandboxStatus, b: &SandboxStatus) -> bool {
    let ordered = |status: &SandboxStatus| {
        let mut status = status.clone();
        status
            .conditions
            .iter_mut()
            .for_each(|c| c.sort_by(|a, b| a.type_.cmp(&b.type_)));
        status
    };
    ordered(a) == ordered(b)
}

/// Computes the status from the children.
pub(super) fn compute(
    sandbox: &Sandbox,
    children: &Children,
    cluster_domain: &str,
    now: Timestamp,
) -> SandboxStatus {
    let key = Key::of(&sandbox.metadata);
    let before = sandbox.status.clone().unwrap_or_default();
    let pod = match &children.pods {
        Pods::One(pod) => Some(pod.as_ref()),
        Pods::Missing | Pods::Many(_) | Pods::Foreign | Pods::Unknown => None,
    };
    let mut conditions = Conditions::new(sandbox, now);
    conditions.set(READY, ready(sandbox, children));
    conditions.set(SUSPENDED, suspended(sandbox, &children.pods));
    if let Some(verdict) = pod.and_then(scheduled) {
        conditions.set(POD_SCHEDULED, verdict);
    }
    if let Some(verdict) = pod.and_then(finished) {
        conditions.set(FINISHED, verdict);
    }

    let has_service = children.service == ServiceState::Exists;
    let selector = format!("{NAME_HASH}={}", names::hash(&key.name));
    SandboxStatus {
        service_fqdn: has_service
            .then(|| format!("{}.{}.svc.{cluster_domain}", key.name, key.namespace)),
        service: has_service.then(|| key.name.clone()),
        selector: before.selector.or_else(|| pod.map(|_| selector)),
        pod_ips: pod.map(|p| p.ips.clone()).filter(|ips| !ips.is_empty()),
        node_name: node_name(before.node_name, pod, is_true(conditions.get(READY))),
        conditions: Some(conditions.list),
    }
}

/// A new node name alone does not cause a write: it is written with the next change, at the latest with Ready.
fn node_name(before: Option<String>, pod: Option<&PodView>, ready: bool) -> Option<String> {
    let node = pod?.node.clone();
    if ready {
        node
    } else {
        before.filter(|before| Some(before) == node.as_ref())
    }
}

fn ready(sandbox: &Sandbox, children: &Children) -> Verdict {
    if let Pods::Many(names) = &children.pods {
        let message = format!(
            "Multiple pods are owned by this sandbox: {}",
            names.join(", ")
        );
        return Verdict::no("MultiplePods", message);
    }
    if sandbox.operating_mode() == OperatingMode::Suspended {
        let gone = matches!(children.pods, Pods::Missing);
        let message = if gone {
            "Sandbox is suspended"
        } else {
            "Sandbox is suspending"
        };
        return Verdict::no("SandboxSuspended", message);
    }
    if let Some(error) = &children.error {
        return error_verdict(error);
    }
    let (pod_ready, pod_words) = match &children.pods {
        Pods::One(pod) => match finished(pod) {
            Some(verdict) => return Verdict::no(&verdict.reason, verdict.message),
            None => pod_readiness(pod),
        },
        Pods::Missing | Pods::Many(_) | Pods::Foreign | Pods::Unknown => {
            (false, "Pod does not exist".to_owned())
        }
    };
    let service_words = match children.service {
        ServiceState::NotWanted => "",
        ServiceState::Exists => "; Service Exists",
        ServiceState::Missing => "; Service does not exist",
    };
    let message = format!("{pod_words}{service_words}");
    if pod_ready && children.service != ServiceState::Missing {
        Verdict::yes("DependenciesReady", message)
    } else {
        Verdict::no("DependenciesNotReady", message)
    }
}

fn pod_readiness(pod: &PodView) -> (bool, String) {
    if pod.meta.deletion_timestamp.is_some() {
        return (false, "Pod is terminating".to_owned());
    }
    match (pod.phase.as_str(), pod.ready, pod.ips.is_empty()) {
        ("Running", true, false) => (true, "Pod is Ready".to_owned()),
        ("Running", true, true) => (false, "Pod is Ready but has no podIPs yet".to_owned()),
        ("Running", false, _) => (false, "Pod is Running but not Ready".to_owned()),
        (phase, _, _) => (false, format!("Pod exists with phase: {phase}")),
    }
}

fn suspended(sandbox: &Sandbox, pods: &Pods) -> Verdict {
    if sandbox.operating_mode() == OperatingMode::Running {
        return Verdict::no("NotSuspended", "Sandbox is not suspended");
    }
    match pods {
        Pods::Missing => Verdict::yes(
            "PodTerminated",
            "Pod has been terminated. Sandbox is suspended",
        ),
        Pods::One(_) | Pods::Many(_) => Verdict::no(
            "PodTerminating",
            "Pod is terminating. Sandbox is suspending",
        ),
        Pods::Foreign => Verdict::no(
            "PodNotOwned",
            "Refused to delete pod because it is not owned by this sandbox",
        ),
        Pods::Unknown => Verdict::unknown(
            "PodStateUnknown",
            "Pod state is unknown. Sandbox suspension cannot be confirmed",
        ),
    }
}

fn scheduled(pod: &PodView) -> Option<Verdict> {
    let (status, reason, message) = pod.scheduled.as_ref()?;
    let verdict = match status.as_str() {
        "True" => Verdict::yes(or(reason, "PodScheduled"), message),
        "False" => Verdict::no(or(reason, "PodSchedulingUnknown"), message),
        _ => Verdict::unknown(or(reason, "PodSchedulingUnknown"), message),
    };
    Some(verdict)
}

/// A valid `reason`. Schedulers may set any text, and the API server rejects a whole status with an invalid reason.
fn or<'a>(word: &'a str, otherwise: &'a str) -> &'a str {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ',' | ':');
    let fits = word.len() <= 1024
        && word.starts_with(|c: char| c.is_ascii_alphabetic())
        && word.chars().all(inner)
        && !word.ends_with([',', ':']);
    if fits { word } else { otherwise }
}

fn finished(pod: &PodView) -> Option<Verdict> {
    match pod.phase.as_str() {
        "Succeeded" => Some(Verdict::yes("PodSucceeded", "Pod completed successfully")),
        "Failed" => Some(Verdict::yes("PodFailed", "Pod failed")),
        _ => None,
    }
}

fn find<'a>(status: &'a SandboxStatus, kind: &str) -> Option<&'a Condition> {
    status.conditions.as_ref()?.iter().find(|c| c.type_ == kind)
}

/// Builder of conditions; keeps `lastTransitionTime` where the status is the same.
pub(super) struct Conditions<'a> {
    sandbox: &'a Sandbox,
    now: Time,
    pub(super) list: Vec<Condition>,
}

impl<'a> Conditions<'a> {
    pub(super) fn new(sandbox: &'a Sandbox, now: Timestamp) -> Self {
        Self {
            sandbox,
            now: Time(now),
            list: Vec::new(),
        }
    }

    pub(super) fn set(&mut self, kind: &str, verdict: Verdict) {
        let generation = self.sandbox.metadata.generation.unwrap_or_default();
        let before = self.sandbox.condition(kind);
        self.list
            .push(verdict.condition(kind, generation, before, &self.now));
    }

    fn get(&self, kind: &str) -> Option<&Condition> {
        self.list.iter().find(|c| c.type_ == kind)
    }
}

/// Records events and metrics of a status change.
fn report(
    ctx: &Context,
    sandbox: &Sandbox,
    before: &SandboxStatus,
    after: &SandboxStatus,
    children: &Children,
) {
    let became = |kind: &str| {
        let condition = find(after, kind).filter(|c| c.status == "True")?;
        (!is_true(find(before, kind))).then_some(condition)
    };
    if let Some(ready) = became(READY) {
        metrics::sandbox_ready(ctx, sandbox);
        ctx.record_event(
            sandbox,
            Event::normal("SandboxReady", "Starting", ready.message.clone()),
        );
    }
    if let Some(suspended) = became(SUSPENDED) {
        ctx.record_event(
            sandbox,
            Event::normal("SandboxSuspended", "Suspending", suspended.message.clone()),
        );
    }
    if let Some(finished) = became(FINISHED) {
        metrics::sandbox_finished(ctx, sandbox, &finished.reason);
        let event = Event::normal(&finished.reason, "Finishing", finished.message.clone());
        ctx.record_event(sandbox, event);
    }
    let reason = |status| find(status, READY).map(|c| c.reason.clone());
    if matches!(children.pods, Pods::Many(_)) && reason(before) != reason(after) {
        let message = find(after, READY)
            .map(|c| c.message.clone())
            .unwrap_or_default();
        ctx.record_event(
            sandbox,
            Event::warning("MultiplePods", "Reconciling", message),
        );
    }
}

#[cfg(test)]
mod tests;
