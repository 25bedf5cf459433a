//! The schemas of the CRDs: field by field against the agent-sandbox API, and PodSpec against that of Kubernetes.

use crate::rig::{rig, test};
use k8e_operator::crd::schema::definitions;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Kind, field, type, and further keywords of its schema.
const FIELDS: &[(&str, &str, &str, &str)] = &[
    (
        "Sandbox",
        "spec.podTemplate",
        "object",
        r#"{"required":["spec"]}"#,
    ),
    (
        "Sandbox",
        "spec.podTemplate.metadata.labels",
        "object",
        r#"{"additionalProperties":{"type":"string"}}"#,
    ),
    (
        "Sandbox",
        "spec.podTemplate.metadata.annotations",
        "object",
        r#"{"additionalProperties":{"type":"string"}}"#,
    ),
    (
        "Sandbox",
        "spec.volumeClaimTemplates",
        "array",
        r#"{"x-kubernetes-list-type":"atomic"}"#,
    ),
    (
        "Sandbox",
        "spec.volumeClaimTemplates[].metadata.name",
        "string",
        "{}",
    ),
    (
        "Sandbox",
        "spec.volumeClaimTemplates[].spec.resources.requests",
        "object",
        "{}",
    ),
    ("Sandbox", "spec.service", "boolean", "{}"),
    (
        "Sandbox",
        "spec.shutdownTime",
        "string",
        r#"{"format":"date-time"}"#,
    ),
    (
        "Sandbox",
        "spec.shutdownPolicy",
        "string",
        r#"{"enum":["Delete","Retain"],"default":"Retain"}"#,
    ),
    (
        "Sandbox",
        "spec.operatingMode",
        "string",
        r#"{"enum":["Running","Suspended"],"default":"Running"}"#,
    ),
    ("Sandbox", "status.serviceFQDN", "string", "{}"),
    ("Sandbox", "status.service", "string", "{}"),
    ("Sandbox", "status.conditions", "array", "{}"),
    (
        "Sandbox",
        "status.conditions[].status",
        "string",
        r#"{"enum":["True","False","Unknown"]}"#,
    ),
    (
        "Sandbox",
        "status.conditions[].reason",
        "string",
        r#"{"minLength":1,"maxLength":1024}"#,
    ),
    ("Sandbox", "status.selector", "string", "{}"),
    (
        "Sandbox",
        "status.podIPs",
        "array",
        r#"{"items":{"type":"string"}}"#,
    ),
    ("Sandbox", "status.nodeName", "string", "{}"),
    (
        "SandboxTemplate",
        "spec.podTemplate",
        "object",
        r#"{"required":["spec"]}"#,
    ),
    (
        "SandboxTemplate",
        "spec.volumeClaimTemplates",
        "array",
        "{}",
    ),
    ("SandboxTemplate", "spec.service", "boolean", "{}"),
    (
        "SandboxTemplate",
        "spec.networkPolicy.ingress",
        "array",
        "{}",
    ),
    (
        "SandboxTemplate",
        "spec.networkPolicy.egress[].to[].ipBlock.cidr",
        "string",
        "{}",
    ),
    (
        "SandboxTemplate",
        "spec.networkPolicyManagement",
        "string",
        r#"{"enum":["Managed","Unmanaged"],"default":"Managed"}"#,
    ),
    (
        "SandboxTemplate",
        "spec.envVarsInjectionPolicy",
        "string",
        r#"{"enum":["Allowed","Overrides","Disallowed"],"default":"Disallowed"}"#,
    ),
    (
        "SandboxTemplate",
        "spec.volumeClaimTemplatesPolicy",
        "string",
        r#"{"default":"Disallowed"}"#,
    ),
    (
        "SandboxClaim",
        "spec.warmPoolRef",
        "object",
        r#"{"required":["name"]}"#,
    ),
    (
        "SandboxClaim",
        "spec.lifecycle.shutdownTime",
        "string",
        r#"{"format":"date-time"}"#,
    ),
    (
        "SandboxClaim",
        "spec.lifecycle.ttlSecondsAfterFinished",
        "integer",
        r#"{"format":"int32","minimum":0}"#,
    ),
    (
        "SandboxClaim",
        "spec.lifecycle.shutdownPolicy",
        "string",
        r#"{"enum":["Delete","DeleteForeground","Retain"],"default":"Retain"}"#,
    ),
    (
        "SandboxClaim",
        "spec.additionalPodMetadata.labels",
        "object",
        "{}",
    ),
    (
        "SandboxClaim",
        "spec.env",
        "array",
        r#"{"x-kubernetes-list-type":"atomic"}"#,
    ),
    ("SandboxClaim", "spec.env[].value", "string", "{}"),
    ("SandboxClaim", "spec.env[].containerName", "string", "{}"),
    (
        "SandboxClaim",
        "spec.volumeClaimTemplates",
        "array",
        r#"{"x-kubernetes-list-type":"atomic"}"#,
    ),
    ("SandboxClaim", "status.sandbox.name", "string", "{}"),
    ("SandboxClaim", "status.sandbox.podIPs", "array", "{}"),
    (
        "SandboxWarmPool",
        "spec.replicas",
        "integer",
        r#"{"format":"int32","minimum":0,"default":1}"#,
    ),
    (
        "SandboxWarmPool",
        "spec.sandboxTemplateRef",
        "object",
        r#"{"required":["name"]}"#,
    ),
    (
        "SandboxWarmPool",
        "spec.updateStrategy.type",
        "string",
        r#"{"enum":["Recreate","OnReplenish"],"default":"OnReplenish"}"#,
    ),
    ("SandboxWarmPool", "status.replicas", "integer", "{}"),
    ("SandboxWarmPool", "status.readyReplicas", "integer", "{}"),
    ("SandboxWarmPool", "status.selector", "string", "{}"),
    (
        "SandboxWarmPool",
        "status.observedGeneration",
        "integer",
        r#"{"format":"int64"}"#,
    ),
];

/// All fields of spec and status, to find those that are not in the table.
const NAMES: &[(&str, &str, &str)] = &[
    (
        "Sandbox",
        "spec",
        "operatingMode podTemplate service shutdownPolicy shutdownTime volumeClaimTemplates",
    ),
    (
        "Sandbox",
        "status",
        "conditions nodeName podIPs selector service serviceFQDN",
    ),
    (
        "SandboxTemplate",
        "spec",
        "envVarsInjectionPolicy networkPolicy networkPolicyManagement podTemplate service volumeClaimTemplates volumeClaimTemplatesPolicy",
    ),
    (
        "SandboxClaim",
        "spec",
        "additionalPodMetadata env lifecycle volumeClaimTemplates warmPoolRef",
    ),
    ("SandboxClaim", "status", "conditions sandbox"),
    (
        "SandboxWarmPool",
        "spec",
        "replicas sandboxTemplateRef updateStrategy",
    ),
    (
        "SandboxWarmPool",
        "status",
        "observedGeneration readyReplicas replicas selector",
    ),
];

fn schema(kind: &str) -> Value {
    let definition = definitions()
        .into_iter()
        .find(|d| d["spec"]["names"]["kind"] == kind);
    let mut definition = definition.expect("a definition");
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"].take()
}

fn field(schema: &Value, path: &str) -> Value {
    let mut at = schema;
    for name in path.split('.') {
        let plain = name.trim_end_matches("[]");
        at = &at["properties"][plain];
        if name.ends_with("[]") {
            at = &at["items"];
        }
    }
    at.clone()
}

#[test]
fn every_field_matches_the_agent_sandbox_api() {
    for (kind, path, of_type, more) in FIELDS {
        let field = field(&schema(kind), path);
        assert_eq!(field["type"], json!(of_type), "{kind} {path}");
        let more: Value = serde_json::from_str(more).expect("JSON");
        for (keyword, value) in more.as_object().expect("an object") {
            assert_eq!(&field[keyword], value, "{kind} {path} {keyword}");
        }
    }
    for (kind, part, names) in NAMES {
        let part = schema(kind)["properties"][part].clone();
        let have: Vec<_> = part["properties"]
            .as_object()
            .expect("fields")
            .keys()
            .map(String::as_str)
            .collect();
        assert_eq!(have.join(" "), *names, "{kind}");
    }
    for kind in [
        "Sandbox",
        "SandboxTemplate",
        "SandboxClaim",
        "SandboxWarmPool",
    ] {
        assert_eq!(schema(kind)["required"], json!(["spec"]), "{kind}");
    }
    assert!(
        schema("SandboxTemplate")["properties"]
            .get("status")
            .is_none()
    );
    assert_eq!(
        schema("SandboxClaim")["properties"]["spec"]["properties"]["env"]["items"]["required"],
        json!(["name", "value"])
    );
}

#[test]
fn the_crds_serve_one_version() {
    for definition in definitions() {
        let spec = &definition["spec"];
        assert_eq!(spec["scope"], "Namespaced");
        assert!(spec["conversion"].is_null() || spec["conversion"]["strategy"] == "None");
        let versions = spec["versions"].as_array().expect("versions");
        assert_eq!(versions.len(), 1);
        assert_eq!(
            (
                &versions[0]["name"],
                &versions[0]["storage"],
                &versions[0]["served"]
            ),
            (&json!("v1beta1"), &json!(true), &json!(true))
        );
        let status = versions[0]["subresources"].get("status").is_some();
        assert_eq!(status, spec["names"]["kind"] != "SandboxTemplate");
        assert!(spec["names"].get("categories").is_none());
    }
}

/// The PodSpec in our schemas has the fields, types, map keys and list types of the one that Kubernetes publishes.
#[test]
fn the_pod_spec_matches_that_of_kubernetes() {
    test(async |_| {
        let text = rig()
            .cluster
            .kubectl()
            .args(["get", "--raw", "/openapi/v3/api/v1"])
            .output()
            .expect("kubectl runs")
            .stdout;
        let published: Value = serde_json::from_slice(&text).expect("a document");
        let schemas = &published["components"]["schemas"];
        let mut differences = Vec::new();
        let theirs = &schemas["io.k8s.api.core.v1.PodSpec"];
        let ours = field(&schema("Sandbox"), "spec.podTemplate.spec");
        compare(&ours, theirs, schemas, "pod", &mut differences);
        let theirs = &schemas["io.k8s.api.core.v1.PersistentVolumeClaimSpec"];
        let ours = field(&schema("Sandbox"), "spec.volumeClaimTemplates[].spec");
        compare_fields(&ours, theirs, schemas, "volume", &mut differences);
        assert!(differences.is_empty(), "{}", differences.join("\n"));
    });
}

fn resolve<'a>(schema: &'a Value, schemas: &'a Value) -> &'a Value {
    let reference = schema
        .get("$ref")
        .or_else(|| schema.pointer("/allOf/0/$ref"));
    match reference
        .and_then(Value::as_str)
        .and_then(|r| r.rsplit('/').next())
    {
        Some(name) => &schemas[name],
        None => schema,
    }
}

/// Fields, types and, for lists, the merge strategy.
fn compare(
    ours: &Value,
    theirs: &Value,
    schemas: &Value,
    path: &str,
    differences: &mut Vec<String>,
) {
    let kind = theirs["x-kubernetes-list-type"].as_str().or(theirs["type"]
        .as_str()
        .filter(|t| *t == "array")
        .map(|_| "atomic"));
    // A set of scalars is merged by value. Where Kubernetes declares nothing, atomic is the safe choice.
    let mine = ours["x-kubernetes-list-type"].as_str();
    if kind == Some("map") && mine != Some("map") {
        differences.push(format!(
            "{path}: {mine:?} instead of a map by {}",
            theirs["x-kubernetes-list-map-keys"]
        ));
    }
    if mine == Some("map")
        && ours["x-kubernetes-list-map-keys"] != theirs["x-kubernetes-list-map-keys"]
    {
        differences.push(format!(
            "{path}: keys {} instead of {}",
            ours["x-kubernetes-list-map-keys"], theirs["x-kubernetes-list-map-keys"]
        ));
    }
    compare_fields(ours, theirs, schemas, path, differences);
}

fn compare_fields(
    ours: &Value,
    theirs: &Value,
    schemas: &Value,
    path: &str,
    differences: &mut Vec<String>,
) {
    let theirs = resolve(theirs, schemas);
    let either = ours["x-kubernetes-int-or-string"] == json!(true);
    let theirs_either = theirs["oneOf"].is_array() || theirs["format"] == "int-or-string";
    if ours["type"] != theirs["type"] && !(either && (theirs_either || theirs["type"] == "string"))
    {
        differences.push(format!(
            "{path}: type {} instead of {}",
            ours["type"], theirs["type"]
        ));
        return;
    }
    let names = |schema: &Value| -> BTreeSet<String> {
        schema["properties"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(name, _)| name.clone())
            .collect()
    };
    for name in names(ours).symmetric_difference(&names(theirs)) {
        differences.push(format!("{path}.{name}: only in one of the two"));
    }
    for name in names(ours).intersection(&names(theirs)) {
        let (ours, theirs) = (&ours["properties"][name], &theirs["properties"][name]);
        // The merge strategy is beside the reference.
        compare(
            ours,
            theirs,
            schemas,
            &format!("{path}.{name}"),
            differences,
        );
    }
    if let (Some(ours), Some(theirs)) = (ours.get("items"), theirs.get("items")) {
        compare_fields(ours, theirs, schemas, &format!("{path}[]"), differences);
    }
    if let (Some(ours), Some(theirs)) = (
        ours.get("additionalProperties"),
        theirs.get("additionalProperties"),
    ) {
        compare_fields(ours, theirs, schemas, &format!("{path}{{}}"), differences);
    }
    let required = |schema: &Value| -> BTreeSet<String> {
        schema["required"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|v| v.as_str().map(str::to_owned))
            .collect()
    };
    if required(ours) != required(theirs) {
        differences.push(format!(
            "{path}: required {:?} instead of {:?}",
            required(ours),
            required(theirs)
        ));
    }
}
