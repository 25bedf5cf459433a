//! Labels and annotations of a sandbox's pod: those of the pod template, and those of the controllers.

use crate::caches::PodView;
use crate::crd::Sandbox;
use crate::crd::names::{
    self, CLAIM_UID, CREATED_BY, NAME_HASH, PROPAGATED_ANNOTATIONS, PROPAGATED_LABELS,
    SAFE_TO_EVICT, TEMPLATE_REF_HASH, WARM_POOL, is_system_key,
};
use crate::object_meta::{Labels, annotation, controller_of, label};
use serde_json::{Map, Value, json};

/// Desired labels and annotations of a pod.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct PodMarks {
    pub(crate) labels: Labels,
    pub(crate) annotations: Labels,
}

/// Desired labels and annotations of the pod of a sandbox. `evictable`: the cluster autoscaler may evict pooled pods.
pub(crate) fn marks(sandbox: &Sandbox, evictable: bool) -> PodMarks {
    let template = &sandbox.spec.pod_template;
    let own = |pairs: &mut dyn Iterator<Item = (&String, &String)>| -> Labels {
        let chosen = pairs.filter(|(key, _)| !is_system_key(key));
        chosen
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect()
    };
    let mut labels = own(&mut template.labels());
    let mut annotations = own(&mut template.annotations());
    let (label_keys, annotation_keys) = (keys(&labels), keys(&annotations));
    for (key, list) in [
        (PROPAGATED_LABELS, label_keys),
        (PROPAGATED_ANNOTATIONS, annotation_keys),
    ] {
        if !list.is_empty() {
            annotations.insert(key.to_owned(), list);
        }
    }

    let meta = &sandbox.metadata;
    let name = meta.name.as_deref().unwrap_or_default();
    labels.insert(NAME_HASH.to_owned(), names::hash(name));
    let owner = controller_of(meta).map(|owner| owner.kind.as_str());
    let pooled = owner == Some("SandboxWarmPool");
    let mut copy = |key: &str| {
        if let Some(value) = label(meta, key) {
            labels.insert(key.to_owned(), value.to_owned());
        }
    };
    if matches!(owner, Some("SandboxWarmPool" | "SandboxClaim")) {
        copy(TEMPLATE_REF_HASH);
    }
    match owner {
        Some("SandboxWarmPool") => copy(WARM_POOL),
        Some("SandboxClaim") => copy(CLAIM_UID),
        _ => {}
    }
    if let Some(client) = label(meta, CREATED_BY) {
        let client = names::known_client(Some(client));
        labels.insert(CREATED_BY.to_owned(), client.to_owned());
    }
    if pooled && evictable {
        let unset = annotations.entry(SAFE_TO_EVICT.to_owned());
        unset.or_insert_with(|| "true".to_owned());
    }
    PodMarks {
        labels,
        annotations,
    }
}

/// The merge patch from the labels and annotations of a pod to `marks`; `None` if there is no difference. Keys of
/// others are kept; only keys that we set earlier are removed.
pub(crate) fn patch(pod: &PodView, marks: &PodMarks) -> Option<Value> {
    let was_pooled = label(&pod.meta, WARM_POOL).is_some();
    let mut label_keys = listed(annotation(&pod.meta, PROPAGATED_LABELS));
    label_keys.extend([WARM_POOL, CLAIM_UID, TEMPLATE_REF_HASH]);
    let mut annotation_keys = listed(annotation(&pod.meta, PROPAGATED_ANNOTATIONS));
    annotation_keys.extend([PROPAGATED_LABELS, PROPAGATED_ANNOTATIONS]);
    if was_pooled && annotation(&pod.meta, SAFE_TO_EVICT) == Some("true") {
        annotation_keys.push(SAFE_TO_EVICT);
    }
    let empty = Labels::new();
    let labels = difference(
        pod.meta.labels.as_ref().unwrap_or(&empty),
        &marks.labels,
        &label_keys,
    );
    let annotations = difference(
        pod.meta.annotations.as_ref().unwrap_or(&empty),
        &marks.annotations,
        &annotation_keys,
    );
    if labels.is_empty() && annotations.is_empty() {
        return None;
    }
    Some(json!({"metadata": {"labels": labels, "annotations": annotations}}))
}

fn difference(have: &Labels, want: &Labels, ours: &[&str]) -> Map<String, Value> {
    let set = want
        .iter()
        .filter(|(key, value)| have.get(*key) != Some(value));
    let set = set.map(|(key, value)| (key.clone(), json!(value)));
    let gone = ours
        .iter()
        .filter(|key| have.contains_key(**key) && !want.contains_key(**key));
    let unset = gone.map(|key| ((*key).to_owned(), Value::Null));
    set.chain(unset).collect()
}

fn keys(labels: &Labels) -> String {
    labels
        .keys()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(",")
}

fn listed(keys: Option<&str>) -> Vec<&str> {
    let keys = keys.unwrap_or_default().split(',');
    keys.filter(|key| !key.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::{PodMetadata, SandboxSpec};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

    fn sandbox(owner: &str, template: &[(&str, &str)]) -> Sandbox {
        let mut sandbox = Sandbox::new("box", SandboxSpec::default());
        sandbox.spec.pod_template.metadata = Some(PodMetadata {
            labels: Some(
                template
                    .iter()
                    .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                    .collect(),
            ),
            annotations: None,
        });
        let labels = [
            (WARM_POOL, "p"),
            (CLAIM_UID, "u"),
            (TEMPLATE_REF_HASH, "t"),
            (CREATED_BY, "me"),
        ];
        sandbox.metadata.labels = Some(
            labels
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
        );
        sandbox.metadata.owner_references = Some(vec![OwnerReference {
            kind: owner.to_owned(),
            controller: Some(true),
            ..OwnerReference::default()
        }]);
        sandbox
    }

    fn pod(marks: &PodMarks) -> PodView {
        let mut pod = PodView::default();
        pod.meta.labels = Some(marks.labels.clone());
        pod.meta.annotations = Some(marks.annotations.clone());
        pod
    }

    #[test]
    fn labels_of_the_pool_are_removed_when_the_sandbox_is_claimed() {
        let pooled = marks(&sandbox("SandboxWarmPool", &[]), true);
        assert_eq!(pooled.labels.get(WARM_POOL).map(String::as_str), Some("p"));
        assert_eq!(
            pooled.annotations.get(SAFE_TO_EVICT).map(String::as_str),
            Some("true")
        );
        assert!(!pooled.labels.contains_key(CLAIM_UID));
        let claimed = marks(&sandbox("SandboxClaim", &[]), true);
        let patch = patch(&pod(&pooled), &claimed).expect("they differ");
        assert_eq!(
            patch["metadata"]["labels"],
            json!({WARM_POOL: null, CLAIM_UID: "u"})
        );
        assert_eq!(
            patch["metadata"]["annotations"],
            json!({SAFE_TO_EVICT: null})
        );
    }

    #[test]
    fn keys_of_the_template_are_synced_and_keys_of_others_kept() {
        let before = marks(
            &sandbox("", &[("a", "1"), ("b", "2"), (NAME_HASH, "forged")]),
            true,
        );
        assert_eq!(before.labels.get(NAME_HASH), Some(&names::hash("box")));
        let mut pod = pod(&before);
        pod.meta
            .labels
            .as_mut()
            .expect("set above")
            .insert("theirs".to_owned(), "x".to_owned());
        let after = marks(&sandbox("", &[("b", "3")]), true);
        let patch = patch(&pod, &after).expect("they differ");
        assert_eq!(patch["metadata"]["labels"], json!({"a": null, "b": "3"}));
        assert_eq!(
            patch["metadata"]["annotations"],
            json!({PROPAGATED_LABELS: "b"})
        );
    }

    #[test]
    fn there_is_no_patch_without_a_difference() {
        let marks = marks(&sandbox("", &[("a", "1")]), true);
        assert_eq!(patch(&pod(&marks), &marks), None);
        assert_eq!(
            marks.labels.get(CREATED_BY).map(String::as_str),
            Some("unknown")
        );
    }
}
