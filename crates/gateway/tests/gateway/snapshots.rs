//! The snapshot registry over the wire.

use crate::server::TestServer;
use k8e_api::client::Client;
use k8e_api::v1;
use tonic::{Code, Status};

async fn put(client: &mut Client, name: &str, layers: Vec<String>) -> Result<(), Status> {
    let request = v1::PutSnapshotRequest {
        name: name.to_owned(),
        layers,
    };
    client.snapshots.put_snapshot(request).await.map(drop)
}

async fn get(client: &mut Client, name: &str) -> Result<Vec<String>, Status> {
    let name = name.to_owned();
    let request = v1::GetSnapshotRequest { name };
    let got = client.snapshots.get_snapshot(request).await?;
    Ok(got.into_inner().layers)
}

async fn delete(client: &mut Client, name: &str) -> Result<(), Status> {
    let name = name.to_owned();
    let request = v1::DeleteSnapshotRequest { name };
    client.snapshots.delete_snapshot(request).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_their_owners() {
    let server = TestServer::start().await;
    let mut ann = server.with_key(&server.key("ann").await).await;
    let mut bob = server.with_key(&server.key("bob").await).await;
    let most = vec!["0a".repeat(32); 1024];
    put(&mut ann, "base", most.clone()).await.unwrap();
    assert_eq!(get(&mut ann, "base").await.unwrap(), most);
    for refused in [
        get(&mut bob, "base").await.unwrap_err(),
        delete(&mut bob, "base").await.unwrap_err(),
    ] {
        assert_eq!(refused.code(), Code::NotFound);
        assert_eq!(refused.message(), "snapshot base not found");
    }
    let list = v1::ListSnapshotsRequest {};
    let listed = ann.snapshots.list_snapshots(list).await.unwrap();
    let listed = listed.into_inner().snapshots;
    assert_eq!((listed[0].name.as_str(), listed[0].layers), ("base", 1024));
    let listed = bob.snapshots.list_snapshots(list).await.unwrap();
    assert!(listed.into_inner().snapshots.is_empty());
    delete(&mut ann, "base").await.unwrap();
    assert_eq!(
        get(&mut ann, "base").await.unwrap_err().code(),
        Code::NotFound
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn names_and_layers_are_checked() {
    let server = TestServer::start().await;
    let mut local = server.local().await;
    let digest = "0a".repeat(32);
    for (name, layers) in [
        ("../../etc", vec![digest.clone()]),
        ("", vec![digest.clone()]),
        ("a", vec![]),
        ("a", vec!["../x".to_owned()]),
        ("a", vec![digest; 1025]),
    ] {
        let refused = put(&mut local, name, layers).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{name}");
    }
    let refused = delete(&mut local, "..").await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}
