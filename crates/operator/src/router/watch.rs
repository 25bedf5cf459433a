//! Keeps the index as the cluster is.

use super::index::Index;
use crate::crd::names::NAME_HASH;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use std::pin::pin;
use std::sync::Arc;

/// After so long the API server ends a watch and we begin the next where it ended. Less than `READ_WITHIN`, which is
/// for a connection that died without a word: until then we would dial addresses that others may have by now.
const WATCH_SECONDS: u32 = 20;

/// Follows the pods of sandboxes. Never ends: a watch that breaks is begun again, with longer and longer pauses, and
/// what is known meanwhile stays.
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
                    tracing::info!("all pods of sandboxes are known");
                }
            }
            Err(error) => tracing::warn!("cannot watch pods, trying again: {error}"),
        }
    }
}
