//! The SandboxTemplate controller: a NetworkPolicy for the sandboxes of each template.

use crate::cache::Key;
use crate::crd::names::{self, TEMPLATE_REF_HASH};
use crate::crd::{NetworkPolicyManagement, SandboxTemplate};
use crate::error::{Error, Result};
use crate::held::{PolicyView, controller_of, label, uid};
use crate::queue::Next;
use crate::world::World;
use k8s_openapi::api::networking::v1::{
    IPBlock, NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPeer,
    NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, OwnerReference};
use kube::api::{DeleteParams, ObjectMeta};
use serde_json::json;

/// Where the router runs; nobody else reaches a sandbox by default.
const ROUTER_NAMESPACE: &str = "agent-sandbox-system";
/// Ranges of the cluster and its neighbours that sandboxes do not reach by default.
const PRIVATE_V4: [&str; 4] = [
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "169.254.0.0/16",
];
const PRIVATE_V6: [&str; 2] = ["fc00::/7", "fe80::/10"];

/// One pass over one template.
pub(crate) async fn reconcile(world: &World, key: &Key) -> Result<Next> {
    let Some(template) = world.held.templates.get(key) else {
        return Ok(Next::Wait);
    };
    if template.metadata.deletion_timestamp.is_some() {
        return Ok(Next::Wait);
    }
    let hash = names::hash(&key.name);
    if label(&template.metadata, TEMPLATE_REF_HASH) != Some(&hash) {
        let patch = json!({"metadata": {"labels": {TEMPLATE_REF_HASH: hash}}});
        let mut patched = world.patch::<SandboxTemplate>(key, patch).await?;
        patched.metadata.managed_fields = None;
        // It may have changed since it was looked at: whoever hears of it first goes on with what it says now.
        if let Some(change) = world.held.templates.put(patched) {
            world.template_changed(&change);
        }
        return Ok(Next::Wait);
    }
    let management = template.spec.network_policy_management.unwrap_or_default();
    match (management, world.held.policies.get(&policy_key(key))) {
        (NetworkPolicyManagement::Managed, None) => make(world, &template).await?,
        (NetworkPolicyManagement::Managed, Some(policy)) => {
            correct(world, &template, &policy).await?
        }
        (NetworkPolicyManagement::Unmanaged, Some(policy)) if is_ours(&policy, &template) => {
            world
                .delete::<NetworkPolicy>(&policy.meta, DeleteParams::default())
                .await?;
        }
        (NetworkPolicyManagement::Unmanaged, _) => {}
    }
    Ok(Next::Wait)
}

async fn make(world: &World, template: &SandboxTemplate) -> Result<()> {
    let key = Key::of(&template.metadata);
    let policy = NetworkPolicy {
        metadata: ObjectMeta {
            name: Some(policy_key(&key).name),
            namespace: Some(key.namespace.clone()),
            owner_references: Some(vec![owner(template)]),
            ..ObjectMeta::default()
        },
        spec: Some(spec(template)),
    };
    match world.create(&policy).await {
        Ok(made) => world.held.policies.put(made.into()),
        Err(error) if error.is_already_exists() => {
            return match world.read::<NetworkPolicy>(&policy_key(&key)).await? {
                Some(found) => correct(world, template, &found.into()).await,
                None => Err(error),
            };
        }
        Err(error) => return Err(error),
    };
    Ok(())
}

/// Brings a policy back to what the template says.
async fn correct(world: &World, template: &SandboxTemplate, policy: &PolicyView) -> Result<()> {
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
    // A merge patch keeps what it does not name: the rules are always named.
    let patch = json!({"spec": {
        "podSelector": wanted.pod_selector,
        "policyTypes": wanted.policy_types,
        "ingress": wanted.ingress.unwrap_or_default(),
        "egress": wanted.egress.unwrap_or_default(),
    }});
    let patched = world
        .patch::<NetworkPolicy>(&Key::of(&policy.meta), patch)
        .await?;
    world.held.policies.put(patched.into());
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
    controller_of(&policy.meta).is_some_and(|o| o.uid == uid(&template.metadata))
}

fn owner(template: &SandboxTemplate) -> OwnerReference {
    OwnerReference {
        api_version: "extensions.agents.x-k8s.io/v1beta1".to_owned(),
        kind: "SandboxTemplate".to_owned(),
        name: template.metadata.name.clone().unwrap_or_default(),
        uid: template.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}
