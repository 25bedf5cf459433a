//! Writes to the API server. Each answer goes into the tables at once.

use super::World;
use crate::cache::Key;
use crate::crd::{Sandbox, SandboxClaim, SandboxWarmPool};
use crate::error::{Class, Context, Result, within};
use crate::held::{Child, PodView};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::api::{Api, DeleteParams, ObjectMeta, Patch, PatchParams, PostParams, Preconditions};
use kube::{Resource, ResourceExt};
use metrics::counter;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fmt::Debug;

/// How the API server names us in managed fields.
const FIELD_MANAGER: &str = "sandbox-controller";

// === impl World ===

impl World {
    pub(crate) fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    pub(crate) async fn create_sandbox(&self, sandbox: &Sandbox) -> Result<Sandbox> {
        let made = self.create(sandbox).await?;
        self.hold_sandbox(made.clone());
        Ok(made)
    }

    pub(crate) async fn patch_sandbox(&self, key: &Key, patch: Value) -> Result<()> {
        let patched = self.patch::<Sandbox>(key, patch).await?;
        self.hold_sandbox(patched);
        Ok(())
    }

    pub(crate) async fn patch_sandbox_status(&self, key: &Key, patch: Value) -> Result<()> {
        let patched = self.patch_status::<Sandbox>(key, patch).await?;
        self.hold_sandbox(patched);
        Ok(())
    }

    pub(crate) fn hold_sandbox(&self, mut sandbox: Sandbox) {
        sandbox.managed_fields_mut().clear();
        if let Some(change) = self.held.sandboxes.put(sandbox) {
            self.sandbox_changed(&change);
        }
    }

    /// The newest version of a sandbox, after a write that lost a race or a name that is taken.
    pub(crate) async fn reread_sandbox(&self, key: &Key) -> Result<Option<Sandbox>> {
        let known = self.held.sandboxes.get(key);
        let read = self.read::<Sandbox>(key).await?;
        match (&read, known) {
            (Some(sandbox), _) => self.hold_sandbox(sandbox.clone()),
            (None, Some(gone)) => {
                if let Some(change) = self.held.sandboxes.remove(&gone.metadata) {
                    self.sandbox_changed(&change);
                }
            }
            (None, None) => {}
        }
        Ok(read)
    }

    pub(crate) async fn patch_claim(&self, key: &Key, patch: Value) -> Result<()> {
        let patched = self.patch::<SandboxClaim>(key, patch).await?;
        self.hold_claim(patched);
        Ok(())
    }

    pub(crate) async fn patch_claim_status(&self, key: &Key, patch: Value) -> Result<()> {
        match self.patch_status::<SandboxClaim>(key, patch).await {
            Ok(patched) => {
                self.hold_claim(patched);
                Ok(())
            }
            Err(error) if error.class() == Class::Conflict => {
                self.reread_claim(key).await?;
                Err(error)
            }
            Err(error) => Err(error),
        }
    }

    async fn reread_claim(&self, key: &Key) -> Result<()> {
        if let Some(claim) = self.read::<SandboxClaim>(key).await? {
            self.hold_claim(claim);
        }
        Ok(())
    }

    fn hold_claim(&self, mut claim: SandboxClaim) {
        claim.managed_fields_mut().clear();
        if let Some(change) = self.held.claims.put(claim) {
            self.claim_changed(&change);
        }
    }

    pub(crate) async fn patch_pool_status(&self, key: &Key, patch: Value) -> Result<()> {
        let mut patched = self.patch_status::<SandboxWarmPool>(key, patch).await?;
        patched.managed_fields_mut().clear();
        if let Some(change) = self.held.pools.put(patched) {
            self.pool_changed(&change);
        }
        Ok(())
    }

    pub(crate) async fn create_pod(&self, pod: &Pod) -> Result<PodView> {
        let made = PodView::from(self.create(pod).await?);
        self.hold_pod(made.clone());
        Ok(made)
    }

    pub(crate) async fn patch_pod(&self, key: &Key, patch: Value) -> Result<()> {
        let patched = self.patch::<Pod>(key, patch).await?;
        self.hold_pod(patched.into());
        Ok(())
    }

    /// A pod as the server has it now; pods without our label are not in the table.
    pub(crate) async fn read_pod(&self, key: &Key) -> Result<Option<PodView>> {
        Ok(self.read::<Pod>(key).await?.map(PodView::from))
    }

    pub(crate) fn hold_pod(&self, pod: PodView) {
        if let Some(change) = self.held.pods.put(pod) {
            self.pod_changed(&change);
        }
    }

    pub(crate) async fn create_service(&self, service: &Service) -> Result<()> {
        let made = Child::from(self.create(service).await?);
        if let Some(change) = self.held.services.put(made) {
            self.service_changed(&change);
        }
        Ok(())
    }

    pub(crate) async fn create_volume(&self, claim: &PersistentVolumeClaim) -> Result<()> {
        let made = Child::from(self.create(claim).await?);
        self.held.volumes.put(made);
        Ok(())
    }

    /// An object as the server has it now.
    pub(crate) async fn read<K>(&self, key: &Key) -> Result<Option<K>>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        let api = self.api::<K>(&key.namespace);
        let read = within(api.get_opt(&key.name)).await;
        read.doing(|| format!("get {} {key}", K::kind(&())))
    }

    pub(crate) async fn create<K>(&self, object: &K) -> Result<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug
            + Serialize,
    {
        let namespace = object.namespace().unwrap_or_default();
        let parameters = PostParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PostParams::default()
        };
        count::<K>("create");
        let api = self.api::<K>(&namespace);
        let made = within(api.create(&parameters, object)).await;
        made.doing(|| {
            let meta = object.meta();
            let name = meta.name.as_ref().or(meta.generate_name.as_ref());
            let name = name.map(String::as_str).unwrap_or_default();
            format!("create {} {namespace}/{name}", K::kind(&()))
        })
    }

    pub(crate) async fn patch<K>(&self, key: &Key, patch: Value) -> Result<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        count::<K>("patch");
        let api = self.api::<K>(&key.namespace);
        let patch = Patch::Merge(patch);
        let parameters = parameters();
        let patched = within(api.patch(&key.name, &parameters, &patch)).await;
        patched.doing(|| format!("patch {} {key}", K::kind(&())))
    }

    async fn patch_status<K>(&self, key: &Key, patch: Value) -> Result<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        count::<K>("patch_status");
        let api = self.api::<K>(&key.namespace);
        let patch = Patch::Merge(patch);
        let parameters = parameters();
        let patched = within(api.patch_status(&key.name, &parameters, &patch)).await;
        patched.doing(|| format!("patch status of {} {key}", K::kind(&())))
    }

    /// Deletes one object, and only that one: a new object of the same name is left alone. Gone already is fine.
    pub(crate) async fn delete<K>(&self, meta: &ObjectMeta, how: DeleteParams) -> Result<()>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        self.delete_if::<K>(meta, None, how).await
    }

    /// Deletes an object as it was looked at; one that changed since is left alone.
    pub(crate) async fn delete_version<K>(&self, meta: &ObjectMeta, how: DeleteParams) -> Result<()>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        self.delete_if::<K>(meta, meta.resource_version.clone(), how)
            .await
    }

    async fn delete_if<K>(
        &self,
        meta: &ObjectMeta,
        resource_version: Option<String>,
        how: DeleteParams,
    ) -> Result<()>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        let key = Key::of(meta);
        let preconditions = Some(Preconditions {
            uid: meta.uid.clone(),
            resource_version,
        });
        count::<K>("delete");
        let api = self.api::<K>(&key.namespace);
        let how = DeleteParams {
            preconditions,
            ..how
        };
        let deleted = within(api.delete(&key.name, &how)).await;
        match deleted.doing(|| format!("delete {} {key}", K::kind(&()))) {
            // A conflict says that another object has the name now, or that it changed: the next pass looks again.
            Err(error) if matches!(error.class(), Class::Gone | Class::Conflict) => Ok(()),
            other => other.map(drop),
        }
    }
}

fn parameters() -> PatchParams {
    PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

fn count<K: Resource<DynamicType = ()>>(verb: &'static str) {
    let kind = K::kind(&()).into_owned();
    counter!("k8e_operator_writes_total", "kind" => kind, "verb" => verb).increment(1);
}
