//! Snapshot registry.

use super::*;
use k8e_model::{SnapshotLayers, SnapshotName};

fn name(text: &str) -> SnapshotName {
    text.parse().unwrap()
}

fn layers(count: usize) -> SnapshotLayers {
    vec!["0a".repeat(32); count].try_into().unwrap()
}

#[tokio::test]
async fn a_put_replaces_the_snapshot_of_that_name() {
    let server = Server::start().await;
    let base = name("base");
    for count in [1, 3] {
        let put = server
            .sessions
            .put_snapshot(&me(), &base, &layers(count))
            .await;
        put.unwrap();
    }
    let server = server.restart().await;
    let sessions = &server.sessions;
    let got = sessions.get_snapshot(&me(), &base).await.unwrap();
    assert_eq!(got, layers(3));
    let listed = sessions.list_snapshots(&me()).await.unwrap();
    assert_eq!((listed.len(), listed[0].layers), (1, 3));
    sessions.delete_snapshot(&me(), &base).await.unwrap();
    let gone = "snapshot base not found";
    let got = sessions.get_snapshot(&me(), &base).await;
    refused(got, Code::NotFound, gone);
    let deleted = sessions.delete_snapshot(&me(), &base).await;
    refused(deleted, Code::NotFound, gone);
}

#[tokio::test]
async fn names_are_per_owner() {
    let server = Server::start().await;
    let sessions = &server.sessions;
    let base = name("base");
    sessions
        .put_snapshot(&me(), &base, &layers(1))
        .await
        .unwrap();
    let gone = "snapshot base not found";
    let got = sessions.get_snapshot(&other(), &base).await;
    refused(got, Code::NotFound, gone);
    let deleted = sessions.delete_snapshot(&other(), &base).await;
    refused(deleted, Code::NotFound, gone);
    assert!(sessions.list_snapshots(&other()).await.unwrap().is_empty());
    let put = sessions.put_snapshot(&other(), &base, &layers(2)).await;
    put.unwrap();
    let mine = sessions.get_snapshot(&me(), &base).await.unwrap();
    assert_eq!(mine, layers(1));
}

#[tokio::test]
async fn snapshots_per_owner_are_limited() {
    let server = Server::start().await;
    let sessions = &server.sessions;
    for n in 0..1000 {
        let name = name(&format!("s{n}"));
        sessions
            .put_snapshot(&me(), &name, &layers(1))
            .await
            .unwrap();
    }
    let more = sessions
        .put_snapshot(&me(), &name("more"), &layers(1))
        .await;
    refused(more, Code::Exhausted, "1000 snapshots");
    let again = sessions.put_snapshot(&me(), &name("s0"), &layers(2)).await;
    again.unwrap();
    let others = sessions
        .put_snapshot(&other(), &name("s"), &layers(1))
        .await;
    others.unwrap();
}
