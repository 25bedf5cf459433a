//! Informers: one list and watch per kind, each filling its cache for as long as the process runs.

use super::Context;
use crate::cache::{Cache, Cached, Change, Key};
use crate::crd::names::NAME_HASH;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::Api;
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::WatchStreamExt;
use kube::runtime::utils::{Backoff, ResetTimerBackoff};
use kube::runtime::watcher::{self, Event};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Resync period: every kind is listed anew, so a lost event is noticed at the latest after this time.
const RELIST: Duration = Duration::from_secs(15 * 60);
/// Exponential back-off between attempts to restart a broken watch: first and longest wait.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// The back-off is reset after a watch has worked for this long. Not earlier: each attempt seems to work at first.
const BACKOFF_RESET_AFTER: Duration = Duration::from_secs(30);

/// Initial cache sync: whether each informer has completed its first list.
pub(crate) struct Synced {
    done: Vec<watch::Receiver<bool>>,
}

/// An informer: what to watch, which cache to fill, and the handler of changes.
struct Informer<K, T> {
    config: watcher::Config,
    cache: fn(&Context) -> &Cache<T>,
    changed: fn(&Context, &Change<T>),
    /// Reduces an object to what the cache keeps of it.
    view: fn(K) -> T,
}

// === impl Context ===

impl Context {
    /// Starts the informers in `tasks`.
    pub(crate) fn watch(self: &Arc<Self>, tasks: &mut JoinSet<()>) -> Synced {
        let mut done = vec![
            self.start_informer(
                tasks,
                whole(|w| &w.caches.sandboxes, Context::sandbox_changed),
            ),
            self.start_informer(
                tasks,
                labelled(|w| &w.caches.pods, Context::pod_changed, Pod::into),
            ),
            self.start_informer(
                tasks,
                labelled(
                    |w| &w.caches.services,
                    Context::service_changed,
                    Service::into,
                ),
            ),
            self.start_informer(
                tasks,
                labelled(
                    |w| &w.caches.volumes,
                    Context::volume_changed,
                    PersistentVolumeClaim::into,
                ),
            ),
        ];
        if self.options.extensions {
            let policies = Informer {
                config: watcher::Config::default(),
                cache: |w| &w.caches.policies,
                changed: Context::policy_changed,
                view: NetworkPolicy::into,
            };
            let nodes = Informer {
                config: watcher::Config::default(),
                cache: |w| &w.caches.nodes,
                changed: |_, _| {},
                view: Node::into,
            };
            done.extend([
                self.start_informer(tasks, whole(|w| &w.caches.claims, Context::claim_changed)),
                self.start_informer(tasks, whole(|w| &w.caches.pools, Context::pool_changed)),
                self.start_informer(
                    tasks,
                    whole(|w| &w.caches.templates, Context::template_changed),
                ),
                self.start_informer(tasks, policies),
                self.start_informer(tasks, nodes),
            ]);
        }
        Synced { done }
    }

    fn start_informer<K, T: Cached>(
        self: &Arc<Self>,
        tasks: &mut JoinSet<()>,
        informer: Informer<K, T>,
    ) -> watch::Receiver<bool>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let (synced, is_synced) = watch::channel(false);
        let ctx = self.clone();
        let kind = K::kind(&()).into_owned();
        tasks.spawn(async move {
            loop {
                // An object that cannot be deserialized must not fail the list of all others.
                let api: Api<DeserializeGuard<K>> = Api::all(ctx.client.clone());
                let stream = watcher::watcher(api, informer.config.clone());
                let view = informer.view;
                let events = stream
                    .backoff(ResetTimerBackoff::new(
                        WatchBackoff::default(),
                        BACKOFF_RESET_AFTER,
                    ))
                    .map_ok(move |event| map(event, view))
                    .boxed();
                let cache = (informer.cache)(&ctx);
                let applying = ctx.apply_events(events, &kind, cache, informer.changed, &synced);
                let _resync = tokio::time::timeout(RELIST, applying).await;
            }
        });
        is_synced
    }

    async fn apply_events<T: Cached>(
        &self,
        mut events: BoxStream<'_, Result<Event<Read<T>>, watcher::Error>>,
        kind: &str,
        cache: &Cache<T>,
        changed: fn(&Context, &Change<T>),
        synced: &watch::Sender<bool>,
    ) {
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => cache.begin_list(),
                Ok(
                    Event::InitApply(Err(invalid))
                    | Event::Apply(Err(invalid))
                    | Event::Delete(Err(invalid)),
                ) => {
                    let key = Key::of(&invalid.metadata);
                    tracing::warn!(kind, %key, error = invalid.error, "cannot deserialize an object; it is ignored");
                    cache.saw(&invalid.metadata);
                }
                Ok(Event::InitApply(Ok(object)) | Event::Apply(Ok(object))) => {
                    if let Some(change) = cache.put(object) {
                        changed(self, &change);
                    }
                }
                Ok(Event::Delete(Ok(object))) => {
                    if let Some(change) = cache.remove(object.meta()) {
                        changed(self, &change);
                    }
                }
                Ok(Event::InitDone) => {
                    for change in cache.end_list() {
                        changed(self, &change);
                    }
                    synced.send_replace(true);
                }
                Err(error) => {
                    tracing::warn!(kind, %error, "watch failed; restarting it after a back-off")
                }
            }
        }
    }
}

/// An informer of a custom resource, cached whole except for its managed fields.
fn whole<K>(cache: fn(&Context) -> &Cache<K>, changed: fn(&Context, &Change<K>)) -> Informer<K, K>
where
    K: Resource<DynamicType = ()>,
{
    Informer {
        config: watcher::Config::default(),
        cache,
        changed,
        view: |mut object| {
            object.managed_fields_mut().clear();
            object
        },
    }
}

/// An informer of a built-in kind, for children of sandboxes only (selected by label).
fn labelled<K, T>(
    cache: fn(&Context) -> &Cache<T>,
    changed: fn(&Context, &Change<T>),
    view: fn(K) -> T,
) -> Informer<K, T> {
    Informer {
        config: watcher::Config::default().labels(NAME_HASH),
        cache,
        changed,
        view,
    }
}

/// An object, or the metadata of one that cannot be deserialized.
type Read<T> = Result<T, Box<InvalidObject>>;

fn map<K, T>(event: Event<DeserializeGuard<K>>, view: fn(K) -> T) -> Event<Read<T>> {
    let read = |guard: DeserializeGuard<K>| guard.0.map(view).map_err(Box::new);
    match event {
        Event::Apply(object) => Event::Apply(read(object)),
        Event::Delete(object) => Event::Delete(read(object)),
        Event::Init => Event::Init,
        Event::InitApply(object) => Event::InitApply(read(object)),
        Event::InitDone => Event::InitDone,
    }
}

/// Exponential back-off of a broken watch; the next wait.
struct WatchBackoff(Duration);

// === impl WatchBackoff ===

impl Default for WatchBackoff {
    fn default() -> Self {
        Self(BACKOFF_MIN)
    }
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = self.0;
        self.0 = (wait * 2).min(BACKOFF_MAX);
        Some(wait)
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {
        self.0 = BACKOFF_MIN;
    }
}

// === impl Synced ===

impl Synced {
    /// Returns when every cache is complete.
    pub(crate) async fn wait(mut self) {
        for done in &mut self.done {
            // The sender is in the informer's task, which never ends.
            let _closed = done.wait_for(|synced| *synced).await;
        }
    }
}
