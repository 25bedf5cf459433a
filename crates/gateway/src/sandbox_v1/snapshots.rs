//! The snapshot registry.

use crate::k8e_v1::{engine_status, model_status};
use k8e_api::convert;
use k8e_api::sandbox_v1 as pb;
use k8e_engine::Sessions;
use k8e_model::{Error, Principal};
use tonic::Status;

pub(super) async fn put(
    sessions: &Sessions,
    who: &Principal,
    request: pb::SnapshotPutRequest,
) -> Result<pb::SnapshotPutResponse, Status> {
    if request.name.is_empty() || request.layers.is_empty() {
        return Err(model_status(Error::invalid("name and layers required")));
    }
    let name = convert::snapshot_name(&request.name).map_err(model_status)?;
    let count = request.layers.len();
    let layers = convert::snapshot_layers(request.layers).map_err(model_status)?;
    let put = sessions.put_snapshot(who, &name, &layers).await;
    put.map_err(engine_status)?;
    Ok(pb::SnapshotPutResponse {
        name: request.name,
        layers: i64::try_from(count).unwrap_or(i64::MAX),
    })
}

pub(super) async fn get(
    sessions: &Sessions,
    who: &Principal,
    request: pb::SnapshotGetRequest,
) -> Result<pb::SnapshotGetResponse, Status> {
    let name = convert::snapshot_name(&request.name).map_err(model_status)?;
    let layers = sessions.get_snapshot(who, &name).await;
    Ok(pb::SnapshotGetResponse {
        name: request.name,
        layers: layers.map_err(engine_status)?.into(),
    })
}

pub(super) async fn list(
    sessions: &Sessions,
    who: &Principal,
) -> Result<pb::SnapshotListResponse, Status> {
    let listed = sessions.list_snapshots(who).await.map_err(engine_status)?;
    Ok(pb::SnapshotListResponse {
        names: listed
            .into_iter()
            .map(|entry| entry.name.to_string())
            .collect(),
    })
}
