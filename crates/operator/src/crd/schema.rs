//! The CustomResourceDefinitions as they are installed: the schemas that the derive generates, with additions.
//!
//! The derive has types and descriptions. Added here by path: defaults, validation rules over several fields, limits of
//! conditions, and merge keys of lists.

mod descriptions;
mod lists;

use super::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Map, Value, json};

/// Validation rule: the name of a Sandbox is also that of its Service, so it must be a DNS label.
const SERVICE_NAME_RULE: &str =
    "!has(self.spec.service) || !self.spec.service || size(self.metadata.name) <= 63";
const VOLUMES_RULE: &str = "has(self.volumeClaimTemplates) == has(oldSelf.volumeClaimTemplates) && \
     (!has(self.volumeClaimTemplates) || self.volumeClaimTemplates == oldSelf.volumeClaimTemplates)";

/// The four definitions, Sandbox first.
pub fn definitions() -> Vec<Value> {
    vec![
        definition(Sandbox::crd(), sandbox),
        definition(SandboxTemplate::crd(), template),
        definition(SandboxClaim::crd(), claim),
        definition(SandboxWarmPool::crd(), warm_pool),
    ]
}

fn definition(crd: CustomResourceDefinition, finish: fn(&mut Value)) -> Value {
    let mut crd = serde_json::to_value(crd).expect("a definition is plain data");
    let schema = crd
        .pointer_mut("/spec/versions/0/schema/openAPIV3Schema")
        .expect("a definition has a schema");
    tidy(schema);
    describe_object(schema);
    conditions(schema);
    finish(schema);
    lists::annotate(schema);
    descriptions::shorten(schema);
    crd
}

fn sandbox(schema: &mut Value) {
    rule(
        schema,
        SERVICE_NAME_RULE,
        "metadata.name must be at most 63 characters when spec.service is true",
    );
    let spec = property(schema, "spec");
    rule(spec, VOLUMES_RULE, "volumeClaimTemplates is immutable");
    set(spec, "shutdownPolicy", "default", json!("Retain"));
    set(spec, "operatingMode", "default", json!("Running"));
    set(
        spec,
        "volumeClaimTemplates",
        "x-kubernetes-list-type",
        json!("atomic"),
    );
}

fn template(schema: &mut Value) {
    let spec = property(schema, "spec");
    set(
        spec,
        "volumeClaimTemplates",
        "x-kubernetes-list-type",
        json!("atomic"),
    );
    set(spec, "networkPolicyManagement", "default", json!("Managed"));
    set(
        spec,
        "envVarsInjectionPolicy",
        "default",
        json!("Disallowed"),
    );
    set(
        spec,
        "volumeClaimTemplatesPolicy",
        "default",
        json!("Disallowed"),
    );
}

fn claim(schema: &mut Value) {
    let spec = property(schema, "spec");
    set(
        spec,
        "volumeClaimTemplates",
        "x-kubernetes-list-type",
        json!("atomic"),
    );
    set(spec, "env", "x-kubernetes-list-type", json!("atomic"));
    set(
        property(spec, "lifecycle"),
        "shutdownPolicy",
        "default",
        json!("Retain"),
    );
}

fn warm_pool(schema: &mut Value) {
    let spec = property(schema, "spec");
    set(spec, "replicas", "default", json!(1));
    set(
        property(spec, "updateStrategy"),
        "type",
        "default",
        json!("OnReplenish"),
    );
}

/// Removes keywords that Kubernetes schemas do not have: `nullable` of optional fields, titles, formats of Rust types.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            // A property may be named `title` or `nullable`; only keywords are removed.
            if object.get("nullable").is_some_and(Value::is_boolean) {
                object.remove("nullable");
            }
            if object.get("title").is_some_and(Value::is_string) {
                object.remove("title");
            }
            let minimum = object.get_mut("minimum");
            if let Some(minimum) = minimum.filter(|m| m.as_f64() == Some(0.0)) {
                *minimum = json!(0);
            }
            object.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Descriptions of apiVersion, kind and metadata, for `kubectl explain`.
fn describe_object(schema: &mut Value) {
    let properties = schema
        .pointer_mut("/properties")
        .and_then(Value::as_object_mut);
    let properties = properties.expect("a definition has properties");
    properties.insert(
        "apiVersion".to_owned(),
        json!({"type": "string", "description": "Version of the schema that this object follows."}),
    );
    properties.insert(
        "kind".to_owned(),
        json!({"type": "string", "description": "The kind of this object."}),
    );
    properties.insert("metadata".to_owned(), json!({"type": "object"}));
}

/// Limits of conditions, the same as of metav1.Condition.
fn conditions(schema: &mut Value) {
    let Some(items) =
        schema.pointer_mut("/properties/status/properties/conditions/items/properties")
    else {
        return;
    };
    let bounds = [
        (
            "type",
            json!({"maxLength": 316, "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"}),
        ),
        ("status", json!({"enum": ["True", "False", "Unknown"]})),
        (
            "reason",
            json!({"maxLength": 1024, "minLength": 1, "pattern": r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"}),
        ),
        ("message", json!({"maxLength": 32768})),
        ("observedGeneration", json!({"minimum": 0})),
    ];
    for (name, bound) in bounds {
        let field = items.get_mut(name).and_then(Value::as_object_mut);
        let field = field.expect("a condition has this field");
        field.extend(bound.as_object().cloned().unwrap_or_default());
    }
}

fn property<'a>(schema: &'a mut Value, name: &str) -> &'a mut Value {
    schema
        .pointer_mut("/properties")
        .and_then(|p| p.get_mut(name))
        .unwrap_or_else(|| panic!("the schema has no property {name}"))
}

fn set(schema: &mut Value, name: &str, keyword: &str, value: Value) {
    object(property(schema, name)).insert(keyword.to_owned(), value);
}

fn rule(schema: &mut Value, rule: &str, message: &str) {
    object(schema).insert(
        "x-kubernetes-validations".to_owned(),
        json!([{"rule": rule, "message": message}]),
    );
}

fn object(value: &mut Value) -> &mut Map<String, Value> {
    value.as_object_mut().expect("a schema is an object")
}
