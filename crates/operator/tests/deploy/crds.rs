//! The CustomResourceDefinitions as files, one for each kind.

use super::{deploy, is_current};
use k8e_operator::crd::schema::definitions;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;

/// Everywhere they are: to be applied, and for Helm, which wants them in the chart.
const PLACES: [&str; 2] = ["crds", "helm/k8e/crds"];

/// Names of files and what they have, in the order in which people list the kinds.
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
fn the_files_are_what_the_types_say() {
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
fn what_is_written_is_read_again() {
    for ((name, text), definition) in files().into_iter().zip(definitions()) {
        let read: Value = serde_saphyr::from_str(&text).unwrap();
        assert!(
            read == definition,
            "{name} says something else than its type"
        );
    }
}
