//! SandboxTemplate: the NetworkPolicy of its sandboxes.

use crate::rig::test;
use k8e_operator::crd::SandboxTemplate;
use k8e_operator::crd::names::{self, TEMPLATE_REF_HASH};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use serde_json::json;

const POLICY: &str = "t-network-policy";

#[test]
fn the_default_policy_allows_internet_egress_and_router_ingress() {
    test(async |space| {
        space.template("t", json!({})).await;
        let policy = space.until::<NetworkPolicy>(POLICY, |_| true).await;
        assert_eq!(policy.owner_references()[0].kind, "SandboxTemplate");
        let spec = serde_json::to_value(policy.spec).expect("a spec");
        assert_eq!(
            spec["podSelector"]["matchLabels"],
            json!({TEMPLATE_REF_HASH: names::hash("t")})
        );
        assert_eq!(spec["policyTypes"], json!(["Ingress", "Egress"]));
        let from = &spec["ingress"][0]["from"];
        assert_eq!(from.as_array().map(Vec::len), Some(1));
        assert_eq!(
            from[0]["podSelector"]["matchLabels"],
            json!({"app": "sandbox-router"})
        );
        assert_eq!(
            from[0]["namespaceSelector"]["matchLabels"],
            json!({"kubernetes.io/metadata.name": "agent-sandbox-system"})
        );
        let blocks = &spec["egress"][0]["to"];
        assert_eq!(
            blocks[0]["ipBlock"],
            json!({"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"]})
        );
        assert_eq!(
            blocks[1]["ipBlock"],
            json!({"cidr": "::/0", "except": ["fc00::/7", "fe80::/10"]})
        );
        space
            .until::<SandboxTemplate>("t", |t| {
                t.labels().get(TEMPLATE_REF_HASH) == Some(&names::hash("t"))
            })
            .await;
    });
}

#[test]
fn rules_of_the_template_replace_the_default_and_are_enforced() {
    test(async |space| {
        let rules = json!({"egress": [{"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}]});
        space.template("t", json!({"networkPolicy": rules})).await;
        let is_custom = |policy: &NetworkPolicy| {
            let spec = policy.spec.clone().unwrap_or_default();
            spec.ingress.is_none_or(|rules| rules.is_empty())
                && serde_json::to_value(spec.egress).expect("rules") == rules["egress"]
        };
        space.until::<NetworkPolicy>(POLICY, is_custom).await;
        // A manual change of the policy is reverted.
        space
            .patch::<NetworkPolicy>(POLICY, json!({"spec": {"egress": [{}], "ingress": [{}]}}))
            .await;
        space.until::<NetworkPolicy>(POLICY, is_custom).await;
        space.delete::<NetworkPolicy>(POLICY).await;
        space.until::<NetworkPolicy>(POLICY, is_custom).await;
        space
            .patch::<SandboxTemplate>(
                "t",
                json!({"spec": {"networkPolicyManagement": "Unmanaged"}}),
            )
            .await;
        space.gone::<NetworkPolicy>(POLICY).await;
    });
}

#[test]
fn a_policy_with_another_owner_is_not_changed() {
    test(async |space| {
        let theirs: NetworkPolicy = space
            .create(json!({"metadata": {"name": POLICY}, "spec": {"podSelector": {}}}))
            .await;
        space.template("t", json!({})).await;
        space
            .until::<SandboxTemplate>("t", |t| t.labels().contains_key(TEMPLATE_REF_HASH))
            .await;
        space
            .patch::<SandboxTemplate>(
                "t",
                json!({"spec": {"networkPolicyManagement": "Unmanaged"}}),
            )
            .await;
        space.pool("pool", "t", 1, json!({})).await;
        space.pool_has("pool", 1).await;
        assert_eq!(
            space
                .get::<NetworkPolicy>(POLICY)
                .await
                .expect("still there")
                .uid(),
            theirs.uid()
        );
    });
}
