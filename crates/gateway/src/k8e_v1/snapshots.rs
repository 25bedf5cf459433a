//! `k8e.v1.Snapshots`: saved workspaces, and the registry of names and layers.

use super::{Answer, Answers, engine_status, first_message, message_status, model_status};
use crate::auth::principal;
use futures::StreamExt as _;
use k8e_api::status::to_status;
use k8e_api::v1::import_snapshot_request::Message;
use k8e_api::v1::snapshots_server::Snapshots;
use k8e_api::{convert, v1};
use k8e_engine::{ExportStream, SavedSnapshot, Sessions};
use k8e_model::Code;
use std::collections::HashMap;
use std::time::Duration;
use tokio::sync::mpsc;
use tonic::{Request, Response, Status, Streaming};

/// Timeout between two messages of an import: the client reads its own disk.
const PART_WITHIN: Duration = Duration::from_secs(60);

/// Parts of an archive that wait to be read.
const PARTS_MAX: usize = 4;

/// The service.
pub(super) struct Service {
    pub(super) sessions: Sessions,
}

// === impl Service ===

#[tonic::async_trait]
impl Snapshots for Service {
    type ExportSnapshotStream = Answers<v1::ExportSnapshotResponse>;

    async fn save_snapshot(
        &self,
        request: Request<v1::SaveSnapshotRequest>,
    ) -> Answer<v1::SavedSnapshot> {
        let who = principal(&request)?;
        let request = request.into_inner();
        let id = convert::session_id(&request.session_id).map_err(model_status)?;
        let name = convert::snapshot_name(&request.name).map_err(model_status)?;
        let saved = self
            .sessions
            .save_snapshot(&who, &id, &name, request.replace);
        let saved = Box::pin(saved).await.map_err(engine_status)?;
        Ok(Response::new(v1::SavedSnapshot {
            added_bytes: saved.added_bytes,
            stopped_us: micros(saved.stopped),
            skipped: saved.skipped,
            ..shown(saved.snapshot)
        }))
    }

    async fn restore_snapshot(
        &self,
        request: Request<v1::RestoreSnapshotRequest>,
    ) -> Answer<v1::RestoreSnapshotResponse> {
        let who = principal(&request)?;
        let request = request.into_inner();
        let id = convert::session_id(&request.session_id).map_err(model_status)?;
        let name = convert::snapshot_name(&request.name).map_err(model_status)?;
        let restored = Box::pin(self.sessions.restore_snapshot(&who, &id, &name)).await;
        let restored = restored.map_err(engine_status)?;
        Ok(Response::new(v1::RestoreSnapshotResponse {
            stopped_us: micros(restored.stopped),
            snapshot: Some(shown(restored.snapshot)),
        }))
    }

    async fn export_snapshot(
        &self,
        request: Request<v1::ExportSnapshotRequest>,
    ) -> Answer<Self::ExportSnapshotStream> {
        let who = principal(&request)?;
        let name = convert::snapshot_name(&request.get_ref().name).map_err(model_status)?;
        let exported = self.sessions.export_snapshot(&who, &name).await;
        let exported = exported.map_err(engine_status)?;
        // The stream owns the export: a client that disconnects ends it.
        Ok(Response::new(
            futures::stream::unfold(exported, next_part).boxed(),
        ))
    }

    async fn import_snapshot(
        &self,
        request: Request<Streaming<v1::ImportSnapshotRequest>>,
    ) -> Answer<v1::SavedSnapshot> {
        let who = principal(&request)?;
        let mut messages = request.into_inner();
        let first = first_message(&mut messages, "import").await?;
        let Some(Message::Start(start)) = first.and_then(|first| first.message) else {
            let why = "the first message of an import must say how";
            return Err(to_status(Code::Invalid, why));
        };
        let name = match start.name.as_str() {
            "" => None,
            name => Some(convert::snapshot_name(name).map_err(model_status)?),
        };
        let (parts, archive) = mpsc::channel(PARTS_MAX);
        let import = self
            .sessions
            .import_snapshot(&who, name, start.foreign, archive);
        let mut import = Box::pin(import);
        let mut feed = Box::pin(feed(messages, parts));
        let imported = tokio::select! {
            imported = &mut import => imported,
            fed = &mut feed => {
                // A client that fails ends the archive too early.
                fed?;
                import.await
            }
        };
        Ok(Response::new(shown(imported.map_err(engine_status)?)))
    }

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
        let saved = self.sessions.saved_snapshot(&who, &parsed).await.ok();
        Ok(Response::new(v1::GetSnapshotResponse {
            name,
            layers,
            saved: saved.map(shown),
        }))
    }

    async fn list_snapshots(
        &self,
        request: Request<v1::ListSnapshotsRequest>,
    ) -> Answer<v1::ListSnapshotsResponse> {
        let who = principal(&request)?;
        let listed = self.sessions.list_snapshots(&who).await;
        let listed = listed.map_err(engine_status)?.into_iter();
        let saved = self.sessions.saved_snapshots(&who).await;
        let saved = saved.map_err(engine_status)?.into_iter();
        let mut saved: HashMap<_, _> = saved.map(|row| (row.name.clone(), row)).collect();
        let entries = listed.map(|entry| v1::SnapshotEntry {
            saved: saved.remove(&entry.name).map(shown),
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

async fn next_part(
    mut exported: ExportStream,
) -> Option<(Result<v1::ExportSnapshotResponse, Status>, ExportStream)> {
    let part = exported.next().await?;
    let part = part.map(|data| v1::ExportSnapshotResponse { data });
    Some((part.map_err(engine_status), exported))
}

/// Passes the parts of an archive on. An error when the client fails; no error when nobody takes any more.
async fn feed(
    mut messages: Streaming<v1::ImportSnapshotRequest>,
    parts: mpsc::Sender<prost::bytes::Bytes>,
) -> Result<(), Status> {
    loop {
        let message = tokio::time::timeout(PART_WITHIN, messages.message()).await;
        let message = message.map_err(|_| {
            let why = format!("nothing came for {PART_WITHIN:?} in the middle of an archive");
            to_status(Code::Timeout, &why)
        })?;
        let Some(message) = message.map_err(message_status)? else {
            return Ok(());
        };
        let Some(Message::Data(data)) = message.message else {
            let why = "after its first message an import carries only data";
            return Err(to_status(Code::Invalid, why));
        };
        if parts.send(data).await.is_err() {
            return Ok(());
        }
    }
}

fn shown(saved: SavedSnapshot) -> v1::SavedSnapshot {
    v1::SavedSnapshot {
        name: saved.name.to_string(),
        digest: saved.digest,
        session_id: saved.session,
        tenant_id: saved.tenant,
        files: saved.files,
        bytes: saved.bytes,
        entries: saved.entries,
        stored_bytes: saved.stored_bytes,
        created_at_unix_ms: saved.created_at,
        ..v1::SavedSnapshot::default()
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
