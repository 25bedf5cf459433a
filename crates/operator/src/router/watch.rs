//! Informer of the router: a list and watch of the pods of sandboxes, which fills the index.

use super::index::Index;
use crate::crd::names::NAME_HASH;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use std::pin::pin;
use std::sync::Arc;

/// Timeout of one watch request; the next one continues where it ended. Less than `READ_WITHIN`, which detects a dead
/// connection: until then the index is stale, and its addresses may belong to other pods by now.
const WATCH_SECONDS: u32 = 20;

/// Watches the pods of sandboxes. Never returns: a broken watch is restarted with exponential back-off, and meanwhile
/// the index keeps its content.
pub(super) async fn follow(client: Client, namespace: Option<String>, index: Arc<Index>) {
    let pods: Api<Pod> = match &namespace {
        Some(namespace) => Api::namespaced(client, namespace),
        None => Api::all(client),
    };
    let config = watcher::Config::default()
        .labels(NAME_HASH)
        .timeout(WATCH_SECONDS);
    let mut events = pin!(watcher(pods, config).default_backoff());
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                let listed = matches!(event, watcher::Event::InitDone);
                index.apply(event);
                if listed {
                    tracing::info!("cache sync of pods complete");
                }
            }
            Err(error) => {
                tracing::warn!("watch of pods failed; restarting it after a back-off: {error}")
            }
        }
    }
}
