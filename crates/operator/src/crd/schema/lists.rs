//! Merge strategy of the lists in a pod spec: list types and map keys (`x-kubernetes-list-type`).
//!
//! Server-side apply needs it when several managers own parts of an object; the API server refuses duplicate keys.

use serde_json::{Value, json};

/// Lists of type map: name of the field, and the keys of its entries. The name is unambiguous within PodSpec;
/// exceptions are in [`mark`].
const MAPS: &[(&str, &[&str])] = &[
    ("containers", &["name"]),
    ("initContainers", &["name"]),
    ("ephemeralContainers", &["name"]),
    ("volumes", &["name"]),
    ("imagePullSecrets", &["name"]),
    ("hostAliases", &["ip"]),
    (
        "topologySpreadConstraints",
        &["topologyKey", "whenUnsatisfiable"],
    ),
    ("resourceClaims", &["name"]),
    ("schedulingGates", &["name"]),
    ("env", &["name"]),
    ("volumeMounts", &["mountPath"]),
    ("volumeDevices", &["devicePath"]),
    ("ownerReferences", &["uid"]),
];

/// References by name in which Kubernetes allows an empty name.
const REFERENCES: &[&str] = &[
    "configMap",
    "configMapKeyRef",
    "configMapRef",
    "imagePullSecrets",
    "nodePublishSecretRef",
    "secret",
    "secretKeyRef",
    "secretRef",
];

/// Adds the merge strategy to the pod spec in `schema`.
pub(super) fn annotate(schema: &mut Value) {
    let Some(pod) = schema.pointer_mut("/properties/spec/properties/podTemplate/properties/spec")
    else {
        return;
    };
    walk(pod, "");
}

fn walk(schema: &mut Value, name: &str) {
    if REFERENCES.contains(&name) {
        allow_no_name(schema);
    }
    let is_list = schema.get("type") == Some(&json!("array"));
    if is_list {
        mark(schema, name);
    }
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        for (name, property) in properties {
            walk(property, name);
        }
    }
    if let Some(items) = schema.get_mut("items") {
        walk(items, name);
    }
}

fn allow_no_name(schema: &mut Value) {
    let schema = match schema.get_mut("items") {
        Some(items) if items.get("properties").is_some() => items,
        _ => schema,
    };
    let Some(required) = schema.get_mut("required").and_then(Value::as_array_mut) else {
        return;
    };
    let before = required.len();
    required.retain(|field| field != "name");
    let (had_name, none_left) = (required.len() < before, required.is_empty());
    if none_left {
        schema.as_object_mut().map(|s| s.remove("required"));
    }
    if had_name {
        schema["properties"]["name"]["default"] = json!("");
    }
}

fn mark(schema: &mut Value, name: &str) {
    let is_port = name == "ports" && schema.pointer("/items/properties/containerPort").is_some();
    let is_claim = name == "claims" && schema.pointer("/items/properties/request").is_some();
    let keys: &[&str] = match MAPS.iter().find(|(field, _)| *field == name) {
        Some((_, keys)) => keys,
        None if is_port => &["containerPort", "protocol"],
        None if is_claim => &["name"],
        None => &[],
    };
    if keys.is_empty() {
        schema["x-kubernetes-list-type"] = json!("atomic");
        return;
    }
    schema["x-kubernetes-list-type"] = json!("map");
    schema["x-kubernetes-list-map-keys"] = json!(keys);
    complete_keys(schema, keys);
}

/// A map key must be required or have a default.
fn complete_keys(schema: &mut Value, keys: &[&str]) {
    let Some(items) = schema.get_mut("items") else {
        return;
    };
    let required = items.get("required").and_then(Value::as_array).cloned();
    let required = required.unwrap_or_default();
    for key in keys {
        if required.contains(&json!(key)) {
            continue;
        }
        let default = if *key == "protocol" { "TCP" } else { "" };
        if let Some(property) = items.pointer_mut(&format!("/properties/{key}")) {
            property["default"] = json!(default);
        }
    }
}
