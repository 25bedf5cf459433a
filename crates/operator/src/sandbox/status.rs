//! What a Sandbox says of itself: a function of what is there, and one write where that is news.

use super::{Children, Pods, ServiceState, error_verdict};
use crate::cache::Key;
use crate::crd::conditions::{FINISHED, POD_SCHEDULED, READY, SUSPENDED, Verdict, is_true};
use crate::crd::names::{self, NAME_HASH};
use crate::crd::{OperatingMode, Sandbox, SandboxStatus};
use crate::error::Result;
use crate::events::Note;
use crate::held::{PodView, controller_of};
use crate::metrics;
use crate::queue::Next;
use crate::world::World;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::time::Duration;

/// How long the first steps of a sandbox that nobody waits for are gathered into one write.
const GATHER: Duration = Duration::from_secs(2);

/// Writes the status if it changed.
pub(super) async fn write(
    world: &World,
    sandbox: &Sandbox,
    children: &Children,
    now: Timestamp,
) -> Result<Next> {
    let status = compute(sandbox, children, &world.options.cluster_domain, now);
    let before = sandbox.status.clone().unwrap_or_default();
    if same(&before, &status) {
        return Ok(Next::Wait);
    }
    let key = Key::of(&sandbox.metadata);
    if may_wait(sandbox, &before, &status)
        && let Some(wait) = world.gathering.hold(&key, GATHER)
    {
        return Ok(Next::After(wait));
    }
    world.gathering.release(&key);
    world
        .patch_sandbox_status(&key, patch(&before, &status))
        .await?;
    tell(world, sandbox, &before, &status, children);
    Ok(Next::Wait)
}

/// The steps of a waiting sandbox on its way to ready interest nobody; that it is ready does.
fn may_wait(sandbox: &Sandbox, before: &SandboxStatus, after: &SandboxStatus) -> bool {
    let pooled = controller_of(&sandbox.metadata).is_some_and(|o| o.kind == "SandboxWarmPool");
    let unready =
        |status: &SandboxStatus| !is_true(find(status, READY)) && find(status, FINISHED).is_none();
    pooled && unready(before) && unready(after)
}

/// The merge patch from one status to another: conditions are written whole, what is gone is removed.
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

/// Whether two statuses say the same, whatever the order of their conditions.
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

/// The status that follows from what is there.
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

/// A new node alone is not worth a write: it is told with the next one, at the latest when the pod is ready.
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

/// A scheduler may say anything; a reason that the API does not take would lose the whole status.
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

/// Conditions under construction, their times taken over from the last ones.
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

/// Events and metrics of what changed.
fn tell(
    world: &World,
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
        metrics::sandbox_ready(world, sandbox);
        world.note(
            sandbox,
            Note::normal("SandboxReady", "Starting", ready.message.clone()),
        );
    }
    if let Some(suspended) = became(SUSPENDED) {
        world.note(
            sandbox,
            Note::normal("SandboxSuspended", "Suspending", suspended.message.clone()),
        );
    }
    if let Some(finished) = became(FINISHED) {
        metrics::sandbox_finished(world, sandbox, &finished.reason);
        let note = Note::normal(&finished.reason, "Finishing", finished.message.clone());
        world.note(sandbox, note);
    }
    let reason = |status| find(status, READY).map(|c| c.reason.clone());
    if matches!(children.pods, Pods::Many(_)) && reason(before) != reason(after) {
        let message = find(after, READY)
            .map(|c| c.message.clone())
            .unwrap_or_default();
        world.note(
            sandbox,
            Note::warning("MultiplePods", "Reconciling", message),
        );
    }
}

#[cfg(test)]
mod tests;
