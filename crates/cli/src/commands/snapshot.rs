//! `k8e sandbox snapshot …`: saves workspaces, and puts them back.

use super::spec::SpecArgs;
use super::template;
use crate::failure::Failure;
use crate::output;
use crate::render::SessionJson;
use crate::table::{self, Column, Format, FormatArgs, Table};
use clap::{Args, Subcommand};
use k8e_api::client::Client;
use k8e_api::v1::import_snapshot_request::Message;
use k8e_api::{CHUNK_BYTES, convert, v1};
use serde::Serialize;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// First paragraphs of `k8e sandbox snapshot --help`.
pub(super) const LONG_ABOUT: &str = "\
Save the workspace of a session under a name, and get it back: in a new session, or in the same.

  k8e sandbox snapshot save $SID before-upgrade
  k8e sandbox snapshot restore before-upgrade --session $SID
  k8e sandbox snapshot restore before-upgrade | jq -r .session_id

A snapshot has the files of /workspace with their permissions, owners, times, links, holes and extended
attributes; not the memory of processes, and no sockets or devices. Snapshots of one owner share what
is the same in them, so that saving again costs what has changed.";

/// Parts of an archive that wait to be sent.
const PARTS_MAX: usize = 4;

/// The commands of `k8e sandbox snapshot`.
#[derive(Subcommand, Debug)]
pub enum SnapshotCommand {
    /// Save the workspace of a session, while it runs
    Save(SaveArgs),
    /// List your snapshots
    List(ListArgs),
    /// Show a snapshot
    Show(NameArgs),
    /// Restore a snapshot: in a new session, or in one that there is
    Restore(Box<RestoreArgs>),
    /// Delete a snapshot
    Delete(NameArgs),
    /// Write a snapshot to one archive file
    Export(ExportArgs),
    /// Make a snapshot of an archive file
    Import(ImportArgs),
}

/// Arguments of `k8e sandbox snapshot save`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The processes of the session are stopped for the end of it, so that all files are of one moment;
`stopped_ms` says how long.

Example:
  k8e sandbox snapshot save $SID nightly --replace | jq .stopped_ms")]
pub struct SaveArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,

    /// Name of the snapshot: lower-case letters, digits and ._-
    name: String,

    /// Replace the snapshot of that name, once the new one is complete
    #[arg(long)]
    replace: bool,
}

/// Arguments of `k8e sandbox snapshot list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    #[command(flatten)]
    format: FormatArgs,
}

const COLUMNS: [Column; 8] = [
    Column::new("NAME"),
    Column::new("SIZE"),
    Column::new("FILES"),
    Column::new("AGE"),
    Column::new("SESSION"),
    Column::wide("STORED"),
    Column::wide("TENANT"),
    Column::wide("DIGEST"),
];

/// Arguments of commands about one snapshot.
#[derive(Args, Debug)]
pub struct NameArgs {
    /// Name of the snapshot
    name: String,
}

/// Arguments of `k8e sandbox snapshot restore`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
In a session that there is, the snapshot takes the place of everything in /workspace; when restoring
fails, the workspace is as it was. Processes go on, with the files that they have open.

Examples:
  k8e sandbox snapshot restore nightly
  k8e sandbox snapshot restore nightly --runtime gvisor --memory 2GiB
  k8e sandbox snapshot restore nightly --session $SID")]
pub struct RestoreArgs {
    /// Name of the snapshot
    name: String,

    /// Restore into this session, instead of a new one
    #[arg(long, value_name = "SESSION")]
    session: Option<String>,

    #[command(flatten)]
    spec: SpecArgs,
}

/// Arguments of `k8e sandbox snapshot export`.
#[derive(Args, Debug)]
pub struct ExportArgs {
    /// Name of the snapshot
    name: String,

    /// File to write; one that exists is not replaced
    file: PathBuf,
}

/// Arguments of `k8e sandbox snapshot import`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Every part of the archive is checked before the snapshot is listed. An archive that this server has
not exported for you is refused; with --foreign its checksums still prove that it is complete, but not
who made it.

Example:
  k8e sandbox snapshot export nightly nightly.k8e
  k8e sandbox snapshot import nightly.k8e --name copy")]
pub struct ImportArgs {
    /// File to read
    file: PathBuf,

    /// Name of the snapshot [default: the name it was exported with]
    #[arg(long)]
    name: Option<String>,

    /// Take an archive of another owner or server
    #[arg(long)]
    foreign: bool,
}

#[derive(Serialize)]
struct SnapshotsJson {
    snapshots: Vec<SnapshotJson>,
}

/// A snapshot; `size_bytes` and `file_count` are the keys of the Go K8E.
#[derive(Serialize)]
struct SnapshotJson {
    name: String,
    created_at: i64,
    size_bytes: u64,
    file_count: u64,
    entries: u64,
    stored_bytes: u64,
    digest: String,
    session_id: String,
    tenant_id: String,
}

#[derive(Serialize)]
struct SavedJson {
    ok: bool,
    #[serde(flatten)]
    snapshot: SnapshotJson,
    added_bytes: u64,
    stopped_ms: f64,
    skipped: u64,
}

#[derive(Serialize)]
struct RestoredJson {
    #[serde(flatten)]
    session: SessionJson,
    restored_from: String,
    stopped_ms: f64,
}

#[derive(Serialize)]
struct DoneJson {
    ok: bool,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    archive_bytes: Option<u64>,
}

// === impl SnapshotCommand ===

impl SnapshotCommand {
    /// Checks names before a server is contacted, or started.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let name = match self {
            Self::Save(args) => &args.name,
            Self::Show(args) | Self::Delete(args) => &args.name,
            Self::Restore(args) => &args.name,
            Self::Export(args) => &args.name,
            Self::Import(ImportArgs {
                name: Some(name), ..
            }) => name,
            Self::Import(_) | Self::List(_) => return Ok(()),
        };
        Ok(convert::snapshot_name(name).map(drop)?)
    }

    /// Whether standard output is JSON; errors are printed as JSON then too.
    pub(crate) fn prints_json(&self) -> bool {
        match self {
            Self::List(args) => args.format.is_json(),
            Self::Save(_)
            | Self::Show(_)
            | Self::Restore(_)
            | Self::Delete(_)
            | Self::Export(_)
            | Self::Import(_) => true,
        }
    }
}

pub(crate) async fn run(command: SnapshotCommand, mut client: Client) -> Result<u8, Failure> {
    match command {
        SnapshotCommand::Save(args) => save(args, client).await,
        SnapshotCommand::List(args) => {
            let request = v1::ListSnapshotsRequest {};
            let listed = client.snapshots.list_snapshots(request).await?.into_inner();
            let saved = listed.snapshots.into_iter().filter_map(|entry| entry.saved);
            let snapshots: Vec<SnapshotJson> = saved.map(SnapshotJson::from).collect();
            match args.format.chosen() {
                Format::Json => output::json(&SnapshotsJson { snapshots })?,
                format @ (Format::Table | Format::Wide | Format::Name) => {
                    table_of(&snapshots).print(format)?
                }
            }
            Ok(0)
        }
        SnapshotCommand::Show(NameArgs { name }) => {
            let request = v1::GetSnapshotRequest { name: name.clone() };
            let shown = client.snapshots.get_snapshot(request).await?.into_inner();
            let Some(saved) = shown.saved else {
                let why = format!("{name} is a registered name for layers, not a saved workspace");
                return Err(Failure::request(why, "precondition"));
            };
            output::json(&SnapshotJson::from(saved)).map(|()| 0)
        }
        SnapshotCommand::Restore(args) => restore(*args, client).await,
        SnapshotCommand::Delete(NameArgs { name }) => {
            let request = v1::DeleteSnapshotRequest { name: name.clone() };
            client.snapshots.delete_snapshot(request).await?;
            done(name, None)
        }
        SnapshotCommand::Export(args) => export(args, client).await,
        SnapshotCommand::Import(args) => import(args, client).await,
    }
}

fn table_of(snapshots: &[SnapshotJson]) -> Table {
    let mut table = Table::new(&COLUMNS);
    for snapshot in snapshots {
        table.row(vec![
            snapshot.name.clone(),
            table::bytes(snapshot.size_bytes),
            snapshot.file_count.to_string(),
            table::ago(snapshot.created_at),
            snapshot.session_id.clone(),
            table::bytes(snapshot.stored_bytes),
            snapshot.tenant_id.clone(),
            snapshot.digest.clone(),
        ]);
    }
    table
}

async fn save(args: SaveArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::SaveSnapshotRequest {
        session_id: args.session_id,
        name: args.name,
        replace: args.replace,
    };
    let saved = client.snapshots.save_snapshot(request).await?.into_inner();
    output::json(&SavedJson {
        ok: true,
        added_bytes: saved.added_bytes,
        stopped_ms: millis(saved.stopped_us),
        skipped: saved.skipped,
        snapshot: saved.into(),
    })
    .map(|()| 0)
}

/// A new session whose restore fails is destroyed again.
async fn restore(args: RestoreArgs, mut client: Client) -> Result<u8, Failure> {
    let (session_id, made) = match args.session {
        Some(id) => (id, false),
        None => {
            // Before there is a session: without a snapshot there is nothing to make it for.
            let name = args.name.clone();
            client
                .snapshots
                .get_snapshot(v1::GetSnapshotRequest { name })
                .await?;
            let request = args.spec.request()?;
            template::ensure(&mut client, &request.template).await?;
            let session = client.create_session(request).await?.into_inner();
            (session.session_id, true)
        }
    };
    let request = v1::RestoreSnapshotRequest {
        session_id: session_id.clone(),
        name: args.name.clone(),
    };
    let restored = match client.snapshots.restore_snapshot(request).await {
        Ok(restored) => restored.into_inner(),
        Err(status) => {
            if made {
                let request = v1::DestroySessionRequest { session_id };
                // The first failure is the one to tell of.
                let _ = client.destroy_session(request).await;
            }
            return Err(status.into());
        }
    };
    let request = v1::GetSessionRequest { session_id };
    let session = client.get_session(request).await?.into_inner();
    output::json(&RestoredJson {
        session: session.into(),
        restored_from: args.name,
        stopped_ms: millis(restored.stopped_us),
    })
    .map(|()| 0)
}

async fn export(args: ExportArgs, mut client: Client) -> Result<u8, Failure> {
    let failed = |error: std::io::Error| Failure::io("write the archive", &error);
    let name = args.name.clone();
    let exported = client
        .snapshots
        .export_snapshot(v1::ExportSnapshotRequest { name })
        .await?;
    let mut parts = exported.into_inner();
    let mut file = File::create_new(&args.file).map_err(failed)?;
    let mut write = async || -> Result<u64, Failure> {
        let mut bytes = 0;
        while let Some(part) = parts.message().await? {
            file.write_all(&part.data).map_err(failed)?;
            bytes += part.data.len() as u64;
        }
        file.sync_all().map_err(failed)?;
        Ok(bytes)
    };
    match write().await {
        Ok(bytes) => done(args.name, Some(bytes)),
        Err(failure) => {
            // Half an archive is none.
            let _ = std::fs::remove_file(&args.file);
            Err(failure)
        }
    }
}

async fn import(args: ImportArgs, mut client: Client) -> Result<u8, Failure> {
    let failed = |error: std::io::Error| Failure::io("read the archive", &error);
    let mut file = File::open(&args.file).map_err(failed)?;
    let (requests, outgoing) = mpsc::channel(PARTS_MAX);
    let start = v1::ImportSnapshotStart {
        name: args.name.unwrap_or_default(),
        foreign: args.foreign,
    };
    let message = |message| v1::ImportSnapshotRequest {
        message: Some(message),
    };
    // It has room for one.
    let _ = requests.try_send(message(Message::Start(start)));
    let reading = tokio::task::spawn_blocking(move || {
        loop {
            let mut data = vec![0; CHUNK_BYTES];
            let read = file.read(&mut data)?;
            data.truncate(read);
            let part = message(Message::Data(data.into()));
            if read == 0 || requests.blocking_send(part).is_err() {
                return Ok(());
            }
        }
    });
    let imported = client
        .snapshots
        .import_snapshot(ReceiverStream::new(outgoing))
        .await;
    let read: Result<std::io::Result<()>, _> = reading.await;
    let read = read.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    let imported = imported?.into_inner();
    read.map_err(failed)?;
    output::json(&SnapshotJson::from(imported)).map(|()| 0)
}

fn done(name: String, archive_bytes: Option<u64>) -> Result<u8, Failure> {
    output::json(&DoneJson {
        ok: true,
        name,
        archive_bytes,
    })
    .map(|()| 0)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "for people: microseconds of minutes"
)]
fn millis(micros: u64) -> f64 {
    micros as f64 / 1000.0
}

// === impl SnapshotJson ===

impl From<v1::SavedSnapshot> for SnapshotJson {
    fn from(saved: v1::SavedSnapshot) -> Self {
        Self {
            name: saved.name,
            created_at: saved.created_at_unix_ms / 1000,
            size_bytes: saved.bytes,
            file_count: saved.files,
            entries: saved.entries,
            stored_bytes: saved.stored_bytes,
            digest: saved.digest,
            session_id: saved.session_id,
            tenant_id: saved.tenant_id,
        }
    }
}
