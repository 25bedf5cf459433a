//! The SandboxTemplate controller: reconciles one NetworkPolicy per template, for all its sandboxes.

use crate::cache::Key;
use crate::caches::PolicyView;
use crate::context::Context;
use crate::crd::names::{self, TEMPLATE_REF_HASH};
use crate::crd::{NetworkPolicyManagement, SandboxTemplate};
use crate::error::{Error, Result};
use crate::object_meta::{is_controlled_by, label, owner_reference};
use crate::work_queue::Action;
use k8s_openapi::api::networking::v1::{
    IPBlock, NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPeer,
    NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::{DeleteParams, ObjectMeta};
use serde_json::json;

/// Namespace of the router; by default only the router may connect to a sandbox.
const ROUTER_NAMESPACE: &str = "agent-sandbox-system";
/// Private and link-local ranges (cluster, node, cloud metadata) that sandboxes cannot reach by default.
const PRIVATE_V4: [&str; 4] = [
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "169.254.0.0/16",
];
const PRIVATE_V6: [&str; 2] = ["fc00::/7", "fe80::/10"];

/// Reconciles one template.
pub(crate) async fn reconcile(ctx: &Context, key: &Key) -> Result<Action> {
    let Some(template) = ctx.caches.templates.get(key) else {
        return Ok(Action::AwaitChange);
    };
    if template.metadata.deletion_timestamp.is_some() {
        return Ok(Action::AwaitChange);
    }
    let hash = names::hash(&key.name);
    if label(&template.metadata, TEMPLATE_REF_HASH) != Some(&hash) {
        let patch = json!({"metadata": {"labels": {TEMPLATE_REF_HASH: hash}}});
        // Its spec may have changed since it was read: the change that this write makes requeues it.
        ctx.patch_template(key, patch).await?;
        return Ok(Action::AwaitChange);
    }
    let management = template.spec.network_policy_management.unwrap_or_default();
    match (management, ctx.caches.policies.get(&policy_key(key))) {
        (NetworkPolicyManagement::Managed, None) => make(ctx, &template).await?,
        (NetworkPolicyManagement::Managed, Some(policy)) => {
            correct(ctx, &template, &policy).await?
        }
        (NetworkPolicyManagement::Unmanaged, Some(policy)) if is_ours(&policy, &template) => {
            ctx.delete::<NetworkPolicy>(&policy.meta, DeleteParams::default())
                .await?;
        }
        (NetworkPolicyManagement::Unmanaged, _) => {}
    }
    Ok(Action::AwaitChange)
}

async fn make(ctx: &Context, template: &SandboxTemplate) -> Result<()> {
    let key = Key::of(&template.metadata);
    let policy = NetworkPolicy {
        metadata: ObjectMeta {
            name: Some(policy_key(&key).name),
            namespace: Some(key.namespace.clone()),
            owner_references: Some(vec![owner_reference(template)]),
            ..ObjectMeta::default()
        },
        spec: Some(spec(template)),
    };
    match ctx.create_policy(&policy).await {
        Err(error) if error.is_already_exists() => {
            match ctx.read::<NetworkPolicy>(&policy_key(&key)).await? {
                Some(found) => correct(ctx, template, &found.into()).await,
                None => Err(error),
            }
        }
        other => other.map(drop),
    }
}

/// Updates a policy that differs from the template.
async fn correct(ctx: &Context, template: &SandboxTemplate, policy: &PolicyView) -> Result<()> {
    if !is_ours(policy, template) {
        let name = policy.meta.name.as_deref().unwrap_or_default();
        return Err(Error::NotOwned(format!(
            "network policy \"{name}\" exists and is not owned by this template"
        )));
    }
    let wanted = spec(template);
    if policy.spec.as_ref() == Some(&wanted) {
        return Ok(());
    }
    // A merge patch keeps fields that it does not contain, so it always contains all rules.
    let patch = json!({"spec": {
        "podSelector": wanted.pod_selector,
        "policyTypes": wanted.policy_types,
        "ingress": wanted.ingress.unwrap_or_default(),
        "egress": wanted.egress.unwrap_or_default(),
    }});
    ctx.patch_policy(&Key::of(&policy.meta), patch).await?;
    Ok(())
}

fn spec(template: &SandboxTemplate) -> NetworkPolicySpec {
    let name = template.metadata.name.as_deref().unwrap_or_default();
    let (ingress, egress) = match &template.spec.network_policy {
        Some(rules) => (rules.ingress.clone(), rules.egress.clone()),
        None => (Some(vec![from_router()]), Some(vec![to_internet()])),
    };
    NetworkPolicySpec {
        pod_selector: Some(selector(&[(TEMPLATE_REF_HASH, &names::hash(name))])),
        policy_types: Some(vec!["Ingress".to_owned(), "Egress".to_owned()]),
        ingress: ingress.filter(|rules| !rules.is_empty()),
        egress: egress.filter(|rules| !rules.is_empty()),
    }
}

fn from_router() -> NetworkPolicyIngressRule {
    let router = NetworkPolicyPeer {
        namespace_selector: Some(selector(&[(
            "kubernetes.io/metadata.name",
            ROUTER_NAMESPACE,
        )])),
        pod_selector: Some(selector(&[("app", "sandbox-router")])),
        ip_block: None,
    };
    NetworkPolicyIngressRule {
        from: Some(vec![router]),
        ports: None,
    }
}

fn to_internet() -> NetworkPolicyEgressRule {
    let block = |cidr: &str, except: &[&str]| NetworkPolicyPeer {
        ip_block: Some(IPBlock {
            cidr: cidr.to_owned(),
            except: Some(except.iter().map(|range| (*range).to_owned()).collect()),
        }),
        ..NetworkPolicyPeer::default()
    };
    let to = vec![block("0.0.0.0/0", &PRIVATE_V4), block("::/0", &PRIVATE_V6)];
    NetworkPolicyEgressRule {
        to: Some(to),
        ports: None,
    }
}

fn selector(labels: &[(&str, &str)]) -> LabelSelector {
    let labels = labels
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    LabelSelector {
        match_labels: Some(labels.collect()),
        match_expressions: None,
    }
}

fn policy_key(template: &Key) -> Key {
    Key::new(
        &template.namespace,
        format!("{}-network-policy", template.name),
    )
}

fn is_ours(policy: &PolicyView, template: &SandboxTemplate) -> bool {
    is_controlled_by(&policy.meta, &template.metadata)
}
