//! Helpers for object metadata: labels, annotations, owner references.

use crate::crd::names::{ADOPTABLE, NAME_HASH};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Resource;
use kube::api::ObjectMeta;
use std::collections::BTreeMap;

/// Labels or annotations.
pub(crate) type Labels = BTreeMap<String, String>;

pub(crate) fn label<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.labels.as_ref()?.get(key).map(String::as_str)
}

pub(crate) fn annotation<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.annotations.as_ref()?.get(key).map(String::as_str)
}

/// UID of an object; empty for one that was not created yet.
pub(crate) fn uid(meta: &ObjectMeta) -> &str {
    meta.uid.as_deref().unwrap_or_default()
}

/// The owner reference by which an object becomes the controller of a child.
pub(crate) fn owner_reference<K: Resource<DynamicType = ()>>(owner: &K) -> OwnerReference {
    let meta = owner.meta();
    OwnerReference {
        api_version: K::api_version(&()).into_owned(),
        kind: K::kind(&()).into_owned(),
        name: meta.name.clone().unwrap_or_default(),
        uid: uid(meta).to_owned(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// The owner reference with `controller: true`.
pub(crate) fn controller_of(meta: &ObjectMeta) -> Option<&OwnerReference> {
    let owners = meta.owner_references.as_ref()?;
    owners.iter().find(|owner| owner.controller == Some(true))
}

/// Whether `owner` is the controller of an object. Compares UIDs, not names.
pub(crate) fn is_controlled_by(meta: &ObjectMeta, owner: &ObjectMeta) -> bool {
    controller_of(meta).is_some_and(|controller| controller.uid == uid(owner))
}

/// Whether an object without a controller may be adopted: it has the label `adoptable`, or the name hash of this
/// sandbox.
pub(crate) fn may_adopt(meta: &ObjectMeta, name_hash: &str) -> bool {
    controller_of(meta).is_none()
        && (label(meta, ADOPTABLE) == Some("true") || label(meta, NAME_HASH) == Some(name_hash))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::{Sandbox, SandboxClaim};

    #[test]
    fn owner_references_name_the_controller() {
        let mut sandbox = Sandbox::new("box", Default::default());
        sandbox.metadata.uid = Some("u".to_owned());
        let reference = owner_reference(&sandbox);
        let named = (reference.api_version.as_str(), reference.kind.as_str());
        assert_eq!(named, ("agents.x-k8s.io/v1beta1", "Sandbox"));
        assert_eq!(
            (reference.name.as_str(), reference.uid.as_str()),
            ("box", "u")
        );
        let child = ObjectMeta {
            owner_references: Some(vec![reference]),
            ..ObjectMeta::default()
        };
        assert!(is_controlled_by(&child, &sandbox.metadata));
        assert!(!is_controlled_by(&child, &ObjectMeta::default()));
        let claim = owner_reference(&SandboxClaim::new("c", Default::default()));
        assert_eq!(claim.api_version, "extensions.agents.x-k8s.io/v1beta1");
    }
}
