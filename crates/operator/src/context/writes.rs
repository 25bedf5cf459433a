//! Writes to the API server. The object in each response is put into its cache at once (read-your-writes), and
//! returned.

use super::Context;
use crate::cache::Key;
use crate::caches::{Child, PodView, PolicyView};
use crate::crd::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use crate::error::{Class, ErrorContext, Result, within};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{Api, DeleteParams, ObjectMeta, Patch, PatchParams, PostParams, Preconditions};
use kube::{Resource, ResourceExt};
use metrics::counter;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fmt::Debug;
use std::sync::Arc;

/// Field manager in `metadata.managedFields`.
const FIELD_MANAGER: &str = "sandbox-controller";

// === impl Context ===

impl Context {
    pub(crate) fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    pub(crate) async fn create_sandbox(&self, sandbox: &Sandbox) -> Result<Arc<Sandbox>> {
        Ok(self.cache_sandbox(self.create(sandbox).await?))
    }

    pub(crate) async fn patch_sandbox(&self, key: &Key, patch: Value) -> Result<Arc<Sandbox>> {
        Ok(self.cache_sandbox(self.patch(key, patch).await?))
    }

    pub(crate) async fn patch_sandbox_status(
        &self,
        key: &Key,
        patch: Value,
    ) -> Result<Arc<Sandbox>> {
        Ok(self.cache_sandbox(self.patch_status(key, patch).await?))
    }

    pub(crate) fn cache_sandbox(&self, mut sandbox: Sandbox) -> Arc<Sandbox> {
        sandbox.managed_fields_mut().clear();
        let sandbox = Arc::new(sandbox);
        if let Some(change) = self.caches.sandboxes.put(Arc::clone(&sandbox)) {
            self.sandbox_changed(&change);
        }
        sandbox
    }

    /// Reads a sandbox past the cache, after a conflict or because its name is taken.
    pub(crate) async fn reread_sandbox(&self, key: &Key) -> Result<Option<Arc<Sandbox>>> {
        let cached = self.caches.sandboxes.get(key);
        if let Some(sandbox) = self.read::<Sandbox>(key).await? {
            return Ok(Some(self.cache_sandbox(sandbox)));
        }
        if let Some(gone) = cached
            && let Some(change) = self.caches.sandboxes.remove(&gone.metadata)
        {
            self.sandbox_changed(&change);
        }
        Ok(None)
    }

    pub(crate) async fn patch_claim(&self, key: &Key, patch: Value) -> Result<Arc<SandboxClaim>> {
        Ok(self.cache_claim(self.patch(key, patch).await?))
    }

    /// On a conflict the claim is read again, so that the next reconcile has its newest version.
    pub(crate) async fn patch_claim_status(
        &self,
        key: &Key,
        patch: Value,
    ) -> Result<Arc<SandboxClaim>> {
        match self.patch_status::<SandboxClaim>(key, patch).await {
            Ok(patched) => Ok(self.cache_claim(patched)),
            Err(error) if error.class() == Class::Conflict => {
                self.reread_claim(key).await?;
                Err(error)
            }
            Err(error) => Err(error),
        }
    }

    async fn reread_claim(&self, key: &Key) -> Result<()> {
        if let Some(claim) = self.read::<SandboxClaim>(key).await? {
            self.cache_claim(claim);
        }
        Ok(())
    }

    fn cache_claim(&self, mut claim: SandboxClaim) -> Arc<SandboxClaim> {
        claim.managed_fields_mut().clear();
        let claim = Arc::new(claim);
        if let Some(change) = self.caches.claims.put(Arc::clone(&claim)) {
            self.claim_changed(&change);
        }
        claim
    }

    pub(crate) async fn patch_pool_status(
        &self,
        key: &Key,
        patch: Value,
    ) -> Result<Arc<SandboxWarmPool>> {
        let mut pool = self.patch_status::<SandboxWarmPool>(key, patch).await?;
        pool.managed_fields_mut().clear();
        let pool = Arc::new(pool);
        if let Some(change) = self.caches.pools.put(Arc::clone(&pool)) {
            self.pool_changed(&change);
        }
        Ok(pool)
    }

    pub(crate) async fn patch_template(
        &self,
        key: &Key,
        patch: Value,
    ) -> Result<Arc<SandboxTemplate>> {
        let mut template = self.patch::<SandboxTemplate>(key, patch).await?;
        template.managed_fields_mut().clear();
        let template = Arc::new(template);
        if let Some(change) = self.caches.templates.put(Arc::clone(&template)) {
            self.template_changed(&change);
        }
        Ok(template)
    }

    pub(crate) async fn create_pod(&self, pod: &Pod) -> Result<Arc<PodView>> {
        Ok(self.cache_pod(PodView::from(self.create(pod).await?)))
    }

    pub(crate) async fn patch_pod(&self, key: &Key, patch: Value) -> Result<Arc<PodView>> {
        Ok(self.cache_pod(PodView::from(self.patch::<Pod>(key, patch).await?)))
    }

    /// Reads a pod past the cache, which has only pods with our label.
    pub(crate) async fn read_pod(&self, key: &Key) -> Result<Option<PodView>> {
        Ok(self.read::<Pod>(key).await?.map(PodView::from))
    }

    pub(crate) fn cache_pod(&self, pod: impl Into<Arc<PodView>>) -> Arc<PodView> {
        let pod = pod.into();
        if let Some(change) = self.caches.pods.put(Arc::clone(&pod)) {
            self.pod_changed(&change);
        }
        pod
    }

    pub(crate) async fn create_service(&self, service: &Service) -> Result<Arc<Child>> {
        Ok(self.cache_service(self.create(service).await?))
    }

    pub(crate) async fn patch_service(&self, key: &Key, patch: Value) -> Result<Arc<Child>> {
        Ok(self.cache_service(self.patch(key, patch).await?))
    }

    fn cache_service(&self, service: Service) -> Arc<Child> {
        let service = Arc::new(Child::from(service));
        if let Some(change) = self.caches.services.put(Arc::clone(&service)) {
            self.service_changed(&change);
        }
        service
    }

    pub(crate) async fn create_volume(&self, claim: &PersistentVolumeClaim) -> Result<Arc<Child>> {
        Ok(self.cache_volume(self.create(claim).await?))
    }

    pub(crate) async fn patch_volume(&self, key: &Key, patch: Value) -> Result<Arc<Child>> {
        Ok(self.cache_volume(self.patch(key, patch).await?))
    }

    fn cache_volume(&self, claim: PersistentVolumeClaim) -> Arc<Child> {
        let claim = Arc::new(Child::from(claim));
        self.caches.volumes.put(Arc::clone(&claim));
        claim
    }

    pub(crate) async fn create_policy(&self, policy: &NetworkPolicy) -> Result<Arc<PolicyView>> {
        Ok(self.cache_policy(self.create(policy).await?))
    }

    pub(crate) async fn patch_policy(&self, key: &Key, patch: Value) -> Result<Arc<PolicyView>> {
        Ok(self.cache_policy(self.patch(key, patch).await?))
    }

    fn cache_policy(&self, policy: NetworkPolicy) -> Arc<PolicyView> {
        let policy = Arc::new(PolicyView::from(policy));
        self.caches.policies.put(Arc::clone(&policy));
        policy
    }

    /// Reads an object past the cache.
    pub(crate) async fn read<K>(&self, key: &Key) -> Result<Option<K>>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        let api = self.api::<K>(&key.namespace);
        let read = within(api.get_opt(&key.name)).await;
        read.with_context(|| format!("get {} {key}", K::kind(&())))
    }

    async fn create<K>(&self, object: &K) -> Result<K>
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
        made.with_context(|| {
            let meta = object.meta();
            let name = meta.name.as_ref().or(meta.generate_name.as_ref());
            let name = name.map(String::as_str).unwrap_or_default();
            format!("create {} {namespace}/{name}", K::kind(&()))
        })
    }

    async fn patch<K>(&self, key: &Key, patch: Value) -> Result<K>
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
        patched.with_context(|| format!("patch {} {key}", K::kind(&())))
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
        patched.with_context(|| format!("patch status of {} {key}", K::kind(&())))
    }

    /// Deletes an object, with its UID as precondition: a new object of the same name is left alone. Not an error if it
    /// does not exist.
    pub(crate) async fn delete<K>(&self, meta: &ObjectMeta, how: DeleteParams) -> Result<()>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        self.delete_if::<K>(meta, None, how).await
    }

    /// Deletes an object with its resourceVersion as precondition (optimistic concurrency): one that changed since is
    /// left alone.
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
        match deleted.with_context(|| format!("delete {} {key}", K::kind(&()))) {
            // A failed precondition: another object has the name now, or it changed. The watch requeues it.
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
