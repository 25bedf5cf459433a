//! `k8e.v1.Snapshots`: what the names of snapshots stand for.

use super::{Answer, engine_status, model_status};
use crate::auth::principal;
use k8e_api::v1::snapshots_server::Snapshots;
use k8e_api::{convert, v1};
use k8e_engine::Sessions;
use tonic::{Request, Response};

/// The service.
pub(super) struct Service {
    pub(super) sessions: Sessions,
}

// === impl Service ===

#[tonic::async_trait]
impl Snapshots for Service {
    async fn put_snapshot(
        &self,
        request: Request<v1::PutSnapshotRequest>,
    ) -> Answer<v1::PutSnapshotResponse> {
        let who = principal(&request)?;
        let request = request.into_inner();
        let name = convert::snapshot_name(&request.name).map_err(model_status)?;
        let layers = convert::snapshot_layers(request.layers).map_err(model_status)?;
        let put = self.sessions.put_snapshot(&who, &name, &layers).await;
        put.map_err(engine_status)?;
        Ok(Response::new(v1::PutSnapshotResponse {}))
    }

    async fn get_snapshot(
        &self,
        request: Request<v1::GetSnapshotRequest>,
    ) -> Answer<v1::GetSnapshotResponse> {
        let who = principal(&request)?;
        let name = request.into_inner().name;
        let parsed = convert::snapshot_name(&name).map_err(model_status)?;
        let layers = self.sessions.get_snapshot(&who, &parsed).await;
        let layers = layers.map_err(engine_status)?.into();
        Ok(Response::new(v1::GetSnapshotResponse { name, layers }))
    }

    async fn list_snapshots(
        &self,
        request: Request<v1::ListSnapshotsRequest>,
    ) -> Answer<v1::ListSnapshotsResponse> {
        let who = principal(&request)?;
        let listed = self.sessions.list_snapshots(&who).await;
        let listed = listed.map_err(engine_status)?.into_iter();
        let entries = listed.map(|entry| v1::SnapshotEntry {
            name: entry.name.to_string(),
            layers: u32::try_from(entry.layers).unwrap_or(u32::MAX),
            updated_at_unix_ms: entry.updated_at,
        });
        Ok(Response::new(v1::ListSnapshotsResponse {
            snapshots: entries.collect(),
        }))
    }

    async fn delete_snapshot(
        &self,
        request: Request<v1::DeleteSnapshotRequest>,
    ) -> Answer<v1::DeleteSnapshotResponse> {
        let who = principal(&request)?;
        let name = convert::snapshot_name(&request.get_ref().name).map_err(model_status)?;
        let deleted = self.sessions.delete_snapshot(&who, &name).await;
        deleted.map_err(engine_status)?;
        Ok(Response::new(v1::DeleteSnapshotResponse {}))
    }
}
