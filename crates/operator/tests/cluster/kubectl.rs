//! kubectl: printer columns, scale, explain and defaults.

use crate::rig::{rig, test};
use k8e_operator::crd::{Sandbox, SandboxWarmPool};
use serde_json::json;

fn kubectl(args: &[&str]) -> String {
    let output = rig()
        .cluster
        .kubectl()
        .args(args)
        .output()
        .expect("kubectl runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kubectl {args:?}: {said}");
    String::from_utf8(output.stdout).expect("text")
}

fn words(text: &str) -> Vec<Vec<&str>> {
    text.lines()
        .map(|line| line.split_whitespace().collect())
        .collect()
}

#[test]
fn printer_columns_are_those_of_agent_sandbox() {
    test(async |space| {
        space.ready_pool("pool", 1).await;
        space.claim("mine", "pool", json!({})).await;
        let bound = space
            .claim_ready("mine")
            .await
            .bound_name()
            .expect("a sandbox")
            .to_owned();
        space.pool_has("pool", 1).await;
        let get = |kind: &str| kubectl(&["-n", &space.name, "get", kind]);
        let table = get("sandboxclaim");
        assert_eq!(
            words(&table)[0],
            ["NAME", "READY", "SANDBOX", "REASON", "AGE"]
        );
        assert_eq!(
            words(&table)[1][..4],
            ["mine", "True", &bound, "DependenciesReady"]
        );
        let table = get("swp");
        assert_eq!(words(&table)[0], ["NAME", "READY", "DESIRED", "AGE"]);
        assert_eq!(words(&table)[1][..3], ["pool", "1", "1"]);
        let table = get("sandbox");
        assert_eq!(words(&table)[0], ["NAME", "READY", "REASON", "AGE"]);
        assert_eq!(words(&table)[1][1..3], ["True", "DependenciesReady"]);
        assert_eq!(words(&get("sandboxtemplate"))[0], ["NAME", "AGE"]);
    });
}

#[test]
fn a_pool_can_be_scaled() {
    test(async |space| {
        space.ready_pool("pool", 1).await;
        kubectl(&["-n", &space.name, "scale", "swp", "pool", "--replicas=3"]);
        space.pool_has("pool", 3).await;
        let scale = kubectl(&[
            "-n",
            &space.name,
            "get",
            "swp",
            "pool",
            "--subresource=scale",
            "-o",
            "json",
        ]);
        let scale: serde_json::Value = serde_json::from_str(&scale).expect("JSON");
        assert_eq!(
            (&scale["spec"]["replicas"], &scale["status"]["replicas"]),
            (&json!(3), &json!(3))
        );
        assert!(scale["status"]["selector"].is_string());
        kubectl(&["-n", &space.name, "scale", "swp", "pool", "--replicas=0"]);
        space.pool_has("pool", 0).await;
        let refused = rig()
            .cluster
            .kubectl()
            .args([
                "-n",
                &space.name,
                "patch",
                "swp",
                "pool",
                "--type=merge",
                "-p",
                r#"{"spec":{"replicas":-1}}"#,
            ])
            .output();
        assert!(!refused.expect("kubectl runs").status.success());
    });
}

#[test]
fn kubectl_explain_describes_the_fields() {
    test(async |_| {
        for (field, kind) in [
            (
                "sandbox.spec.podTemplate.spec.containers.resources.limits",
                "map[string]",
            ),
            ("sandbox.spec.operatingMode", "string"),
            ("sandbox.status.podIPs", "[]string"),
            (
                "sandboxclaim.spec.lifecycle.ttlSecondsAfterFinished",
                "integer",
            ),
            ("sandboxwarmpool.spec.updateStrategy.type", "string"),
            (
                "sandboxtemplate.spec.networkPolicy.egress.to.ipBlock.except",
                "[]string",
            ),
        ] {
            let text = kubectl(&["explain", field]);
            assert!(
                text.contains("DESCRIPTION:") && text.contains(kind),
                "{field}: {text}"
            );
        }
    });
}

#[test]
fn unset_fields_get_their_defaults() {
    test(async |space| {
        space.sandbox("box", json!({})).await;
        space
            .pool(
                "pool",
                "none",
                0,
                json!({"replicas": null, "updateStrategy": {}}),
            )
            .await;
        space.template("t", json!({})).await;
        let claim = space.claim("mine", "none", json!({"lifecycle": {}})).await;
        let sandbox = serde_json::to_value(space.get::<Sandbox>("box").await.expect("there").spec)
            .expect("a spec");
        assert_eq!(
            (&sandbox["shutdownPolicy"], &sandbox["operatingMode"]),
            (&json!("Retain"), &json!("Running"))
        );
        let pool = serde_json::to_value(
            space
                .get::<SandboxWarmPool>("pool")
                .await
                .expect("there")
                .spec,
        )
        .expect("a spec");
        assert_eq!(
            (&pool["replicas"], &pool["updateStrategy"]["type"]),
            (&json!(1), &json!("OnReplenish"))
        );
        let claim = serde_json::to_value(claim.spec).expect("a spec");
        assert_eq!(claim["lifecycle"]["shutdownPolicy"], json!("Retain"));
        let template = kubectl(&[
            "-n",
            &space.name,
            "get",
            "sandboxtemplate",
            "t",
            "-o",
            "jsonpath={.spec.envVarsInjectionPolicy},{.spec.networkPolicyManagement},{.spec.volumeClaimTemplatesPolicy}",
        ]);
        assert_eq!(template, "Disallowed,Managed,Disallowed");
    });
}
