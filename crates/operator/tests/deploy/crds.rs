//! The CustomResourceDefinition files, one per kind.

use super::{deploy, is_current};
use k8e_operator::crd::schema::definitions;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;

/// Directories of the files: for kubectl, and in the chart for Helm.
const PLACES: [&str; 2] = ["crds", "helm/k8e/crds"];

/// Names and content of the files.
pub(crate) fn files() -> Vec<(String, String)> {
    let file = |definition: &Value| {
        let text = |pointer| definition.pointer(pointer).and_then(Value::as_str).unwrap();
        let name = format!(
            "{}_{}.yaml",
            text("/spec/group"),
            text("/spec/names/plural")
        );
        (name, serde_saphyr::to_string(definition).unwrap())
    };
    definitions().iter().map(file).collect()
}

#[test]
fn the_files_are_generated_from_the_types() {
    for place in PLACES {
        let dir = deploy().join(place);
        for (name, text) in files() {
            is_current(&dir.join(name), &text);
        }
        let wanted: BTreeSet<_> = files().into_iter().map(|(name, _)| name).collect();
        let found = fs::read_dir(&dir).unwrap();
        let found: BTreeSet<_> = found
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(found, wanted, "{}", dir.display());
    }
}

#[test]
fn the_files_parse_back_to_the_definitions() {
    for ((name, text), definition) in files().into_iter().zip(definitions()) {
        let read: Value = serde_saphyr::from_str(&text).unwrap();
        assert!(
            read == definition,
            "{name} differs from the definition of its type"
        );
    }
}
