//! `k8e sandbox stat`, `mkdir`, `mv` and `rm`: file operations in the workspace.

use crate::failure::Failure;
use crate::output;
use crate::render::{FileJson, Text};
use crate::units;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;
use std::ffi::OsString;

/// Arguments of `k8e sandbox stat`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox stat $SID result.json | jq .size")]
pub struct StatArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,
    /// Path of the file, absolute or relative to /workspace; nothing outside /workspace
    path: OsString,
}

/// Arguments of `k8e sandbox mkdir`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox mkdir $SID out/2024 --parents")]
pub struct MkdirArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,
    /// Path of the directory, absolute or relative to /workspace; nothing outside /workspace
    path: OsString,
    /// Create missing parent directories; an existing directory is not an error
    #[arg(long, short)]
    parents: bool,
    /// Permissions of the new directory, octal
    #[arg(long, default_value = "0755", value_name = "MODE", value_parser = units::permissions)]
    perm: u32,
}

/// Arguments of `k8e sandbox mv`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox mv $SID draft.txt final.txt")]
pub struct MvArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,
    /// Path of the file, absolute or relative to /workspace; nothing outside /workspace
    from: OsString,
    /// New path, below /workspace
    to: OsString,
}

/// Arguments of `k8e sandbox rm`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox rm $SID build --recursive")]
pub struct RmArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,
    /// Path of the file, absolute or relative to /workspace; nothing outside /workspace
    path: OsString,
    /// Remove a directory and its contents
    #[arg(long, short)]
    recursive: bool,
}

/// JSON output of commands that change files.
#[derive(Serialize)]
pub(super) struct ChangedJson {
    ok: bool,
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
}

pub(crate) async fn stat(args: StatArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::StatFileRequest {
        session_id: args.session_id,
        path: path_bytes(args.path),
    };
    let file = client.stat_file(request).await?.into_inner();
    output::json(&FileJson::from(file)).map(|()| 0)
}

pub(crate) async fn mkdir(args: MkdirArgs, mut client: Client) -> Result<u8, Failure> {
    let MkdirArgs {
        session_id,
        path,
        parents,
        perm: mode,
    } = args;
    let changed = ChangedJson::new(&path, None);
    client
        .make_dir(v1::MakeDirRequest {
            session_id,
            path: path_bytes(path),
            parents,
            mode,
        })
        .await?;
    output::json(&changed).map(|()| 0)
}

pub(crate) async fn mv(args: MvArgs, mut client: Client) -> Result<u8, Failure> {
    let changed = ChangedJson::new(&args.to, None);
    let request = v1::MoveFileRequest {
        session_id: args.session_id,
        from: path_bytes(args.from),
        to: path_bytes(args.to),
    };
    client.move_file(request).await?;
    output::json(&changed).map(|()| 0)
}

pub(crate) async fn rm(args: RmArgs, mut client: Client) -> Result<u8, Failure> {
    let RmArgs {
        session_id,
        path,
        recursive,
    } = args;
    let changed = ChangedJson::new(&path, None);
    client
        .remove_file(v1::RemoveFileRequest {
            session_id,
            path: path_bytes(path),
            recursive,
        })
        .await?;
    output::json(&changed).map(|()| 0)
}

/// A path as bytes: it need not be UTF-8.
pub(super) fn path_bytes<B: From<Vec<u8>>>(path: OsString) -> B {
    path.into_encoded_bytes().into()
}

// === impl ChangedJson ===

impl ChangedJson {
    pub(super) fn new(path: &OsString, bytes: Option<u64>) -> Self {
        let path = Text::from(path.as_encoded_bytes().to_vec()).text;
        Self {
            ok: true,
            path,
            bytes,
        }
    }
}
