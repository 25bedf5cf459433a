//! One watch per kind, each filling its table for as long as the process lives.

use super::World;
use crate::cache::{Cache, Change, Held, Key};
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

/// A lost event is found at the latest after this long: the whole kind is listed anew.
const RELIST: Duration = Duration::from_secs(15 * 60);
/// Waits between attempts to get a broken watch back.
const FIRST_RETRY: Duration = Duration::from_millis(100);
const LONGEST_RETRY: Duration = Duration::from_secs(5);
/// Only a watch that held this long begins anew with short waits: each attempt looks well at first.
const PATIENCE_RETURNS: Duration = Duration::from_secs(30);

/// Whether each of the watches has brought its first list.
pub(crate) struct Synced {
    done: Vec<watch::Receiver<bool>>,
}

/// Where the objects of a kind go, and who hears of changes.
struct Route<K, T> {
    config: watcher::Config,
    table: fn(&World) -> &Cache<T>,
    changed: fn(&World, &Change<T>),
    view: fn(K) -> T,
}

// === impl World ===

impl World {
    /// Starts the watches in `tasks`.
    pub(crate) fn watch(self: &Arc<Self>, tasks: &mut JoinSet<()>) -> Synced {
        let mut done = vec![
            self.follow(tasks, whole(|w| &w.held.sandboxes, World::sandbox_changed)),
            self.follow(
                tasks,
                labelled(|w| &w.held.pods, World::pod_changed, Pod::into),
            ),
            self.follow(
                tasks,
                labelled(|w| &w.held.services, World::service_changed, Service::into),
            ),
            self.follow(
                tasks,
                labelled(
                    |w| &w.held.volumes,
                    World::volume_changed,
                    PersistentVolumeClaim::into,
                ),
            ),
        ];
        if self.options.extensions {
            let policies = Route {
                config: watcher::Config::default(),
                table: |w| &w.held.policies,
                changed: World::policy_changed,
                view: NetworkPolicy::into,
            };
            let nodes = Route {
                config: watcher::Config::default(),
                table: |w| &w.held.nodes,
                changed: |_, _| {},
                view: Node::into,
            };
            done.extend([
                self.follow(tasks, whole(|w| &w.held.claims, World::claim_changed)),
                self.follow(tasks, whole(|w| &w.held.pools, World::pool_changed)),
                self.follow(tasks, whole(|w| &w.held.templates, World::template_changed)),
                self.follow(tasks, policies),
                self.follow(tasks, nodes),
            ]);
        }
        Synced { done }
    }

    fn follow<K, T: Held>(
        self: &Arc<Self>,
        tasks: &mut JoinSet<()>,
        route: Route<K, T>,
    ) -> watch::Receiver<bool>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let (synced, is_synced) = watch::channel(false);
        let world = self.clone();
        let kind = K::kind(&()).into_owned();
        tasks.spawn(async move {
            loop {
                // One object that cannot be read must not hide all others.
                let api: Api<DeserializeGuard<K>> = Api::all(world.client.clone());
                let stream = watcher::watcher(api, route.config.clone());
                let view = route.view;
                let events = stream
                    .backoff(ResetTimerBackoff::new(
                        Patience::default(),
                        PATIENCE_RETURNS,
                    ))
                    .map_ok(move |event| map(event, view))
                    .boxed();
                let table = (route.table)(&world);
                let follow = world.take_in(events, &kind, table, route.changed, &synced);
                let _time_to_list_again = tokio::time::timeout(RELIST, follow).await;
            }
        });
        is_synced
    }

    async fn take_in<T: Held>(
        &self,
        mut events: BoxStream<'_, Result<Event<Read<T>>, watcher::Error>>,
        kind: &str,
        table: &Cache<T>,
        changed: fn(&World, &Change<T>),
        synced: &watch::Sender<bool>,
    ) {
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => table.begin_list(),
                Ok(
                    Event::InitApply(Err(invalid))
                    | Event::Apply(Err(invalid))
                    | Event::Delete(Err(invalid)),
                ) => {
                    let key = Key::of(&invalid.metadata);
                    tracing::warn!(kind, %key, error = invalid.error, "an object cannot be read and is left alone");
                    table.saw(&invalid.metadata);
                }
                Ok(Event::InitApply(Ok(object)) | Event::Apply(Ok(object))) => {
                    if let Some(change) = table.put(object) {
                        changed(self, &change);
                    }
                }
                Ok(Event::Delete(Ok(object))) => {
                    if let Some(change) = table.remove(object.meta()) {
                        changed(self, &change);
                    }
                }
                Ok(Event::InitDone) => {
                    for change in table.end_list() {
                        changed(self, &change);
                    }
                    synced.send_replace(true);
                }
                Err(error) => tracing::warn!(kind, %error, "the watch broke off; trying again"),
            }
        }
    }
}

/// A kind of ours, kept as it is.
fn whole<K>(table: fn(&World) -> &Cache<K>, changed: fn(&World, &Change<K>)) -> Route<K, K>
where
    K: Resource<DynamicType = ()>,
{
    Route {
        config: watcher::Config::default(),
        table,
        changed,
        view: |mut object| {
            object.managed_fields_mut().clear();
            object
        },
    }
}

/// A kind of Kubernetes of which only the sandboxes' children are wanted.
fn labelled<K, T>(
    table: fn(&World) -> &Cache<T>,
    changed: fn(&World, &Change<T>),
    view: fn(K) -> T,
) -> Route<K, T> {
    Route {
        config: watcher::Config::default().labels(NAME_HASH),
        table,
        changed,
        view,
    }
}

/// An object, or what is known of one that cannot be read.
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

/// How long to wait before a broken watch is tried again.
struct Patience(Duration);

// === impl Patience ===

impl Default for Patience {
    fn default() -> Self {
        Self(FIRST_RETRY)
    }
}

impl Iterator for Patience {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = self.0;
        self.0 = (wait * 2).min(LONGEST_RETRY);
        Some(wait)
    }
}

impl Backoff for Patience {
    fn reset(&mut self) {
        self.0 = FIRST_RETRY;
    }
}

// === impl Synced ===

impl Synced {
    /// Returns when every table is complete.
    pub(crate) async fn wait(mut self) {
        for done in &mut self.done {
            // The sender lives as long as the process.
            let _closed = done.wait_for(|synced| *synced).await;
        }
    }
}
