//! States that cannot be produced with a healthy API server.

use super::*;
use crate::crd::SandboxSpec;
use crate::error::Error;
use std::sync::Arc;

fn sandbox(mode: OperatingMode) -> Sandbox {
    let mut sandbox = Sandbox::new("box", SandboxSpec::default());
    sandbox.metadata.namespace = Some("ns".to_owned());
    sandbox.metadata.generation = Some(3);
    sandbox.spec.operating_mode = Some(mode);
    sandbox
}

fn said(
    sandbox: &Sandbox,
    pods: Pods,
    service: ServiceState,
    kind: &str,
) -> (String, String, String) {
    let error = matches!(pods, Pods::Unknown).then(|| Error::NotOwned("no answer".to_owned()));
    let children = Children {
        pods,
        service,
        error,
    };
    let status = compute(sandbox, &children, "cluster.local", Timestamp::UNIX_EPOCH);
    let condition = find(&status, kind).expect("the condition").clone();
    assert_eq!(condition.observed_generation, Some(3));
    (condition.status, condition.reason, condition.message)
}

fn words(status: &str, reason: &str, message: &str) -> (String, String, String) {
    (status.to_owned(), reason.to_owned(), message.to_owned())
}

#[test]
fn a_pod_that_cannot_be_read_is_unknown() {
    let sandbox = sandbox(OperatingMode::Suspended);
    let unknown = words(
        "Unknown",
        "PodStateUnknown",
        "Pod state is unknown. Sandbox suspension cannot be confirmed",
    );
    assert_eq!(
        said(&sandbox, Pods::Unknown, ServiceState::NotWanted, SUSPENDED),
        unknown
    );
    let suspending = words("False", "SandboxSuspended", "Sandbox is suspending");
    assert_eq!(
        said(&sandbox, Pods::Unknown, ServiceState::NotWanted, READY),
        suspending
    );
}

#[test]
fn the_message_names_what_is_missing() {
    let sandbox = sandbox(OperatingMode::Running);
    let said = |service| said(&sandbox, Pods::Missing, service, READY);
    let no = |message| words("False", "DependenciesNotReady", message);
    assert_eq!(said(ServiceState::NotWanted), no("Pod does not exist"));
    assert_eq!(
        said(ServiceState::Exists),
        no("Pod does not exist; Service Exists")
    );
    assert_eq!(
        said(ServiceState::Missing),
        no("Pod does not exist; Service does not exist")
    );
}

#[test]
fn a_ready_pod_needs_an_address_and_its_service() {
    let sandbox = sandbox(OperatingMode::Running);
    let mut pod = PodView {
        phase: "Running".to_owned(),
        ready: true,
        ..PodView::default()
    };
    let said =
        |pod: &PodView, service| said(&sandbox, Pods::One(Arc::new(pod.clone())), service, READY);
    let no = |message| words("False", "DependenciesNotReady", message);
    assert_eq!(
        said(&pod, ServiceState::NotWanted),
        no("Pod is Ready but has no podIPs yet")
    );
    pod.ips = vec!["10.0.0.1".to_owned()];
    assert_eq!(
        said(&pod, ServiceState::Missing),
        no("Pod is Ready; Service does not exist")
    );
    assert_eq!(
        said(&pod, ServiceState::NotWanted),
        words("True", "DependenciesReady", "Pod is Ready")
    );
    pod.meta.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    assert_eq!(
        said(&pod, ServiceState::NotWanted),
        no("Pod is terminating")
    );
}

#[test]
fn an_empty_or_invalid_scheduler_reason_is_replaced() {
    let verdict = |status: &str| {
        let scheduled = Some((status.to_owned(), String::new(), String::new()));
        scheduled_of(&PodView {
            scheduled,
            ..PodView::default()
        })
        .reason
    };
    assert_eq!(verdict("True"), "PodScheduled");
    assert_eq!(verdict("False"), "PodSchedulingUnknown");
    assert_eq!(verdict("Unknown"), "PodSchedulingUnknown");
}

fn scheduled_of(pod: &PodView) -> Verdict {
    scheduled(pod).expect("a condition")
}

#[test]
fn the_order_of_conditions_does_not_matter() {
    let sandbox = sandbox(OperatingMode::Running);
    let children = Children {
        pods: Pods::Missing,
        service: ServiceState::NotWanted,
        error: None,
    };
    let status = compute(&sandbox, &children, "cluster.local", Timestamp::UNIX_EPOCH);
    let mut again = Sandbox {
        status: Some(status.clone()),
        ..sandbox
    };
    again
        .status
        .iter_mut()
        .flat_map(|s| s.conditions.iter_mut())
        .for_each(|c| c.reverse());
    let later = compute(&again, &children, "cluster.local", Timestamp::now());
    assert!(same(&status, &later), "times stay while the status does");
}
