//! `k8e sandbox stat`, `mkdir`, `mv` and `rm`: small calls about files, one request each.

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
    /// The session
    #[arg(value_name = "SESSION")]
    session_id: String,
    /// The file, below /workspace
    path: OsString,
}

/// Arguments of `k8e sandbox mkdir`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox mkdir $SID out/2024 --parents")]
pub struct MkdirArgs {
    /// The session
    #[arg(value_name = "SESSION")]
    session_id: String,
    /// The directory, below /workspace
    path: OsString,
    /// Make missing directories above it; an existing one is no error
    #[arg(long, short)]
    parents: bool,
    /// Its permissions
    #[arg(long, default_value = "0755", value_name = "MODE", value_parser = units::permissions)]
    perm: u32,
}

/// Arguments of `k8e sandbox mv`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox mv $SID draft.txt final.txt")]
pub struct MvArgs {
    /// The session
    #[arg(value_name = "SESSION")]
    session_id: String,
    /// The file, below /workspace
    from: OsString,
    /// Its new path, below /workspace
    to: OsString,
}

/// Arguments of `k8e sandbox rm`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox rm $SID build --recursive")]
pub struct RmArgs {
    /// The session
    #[arg(value_name = "SESSION")]
    session_id: String,
    /// The file, below /workspace
    path: OsString,
    /// A directory with everything in it
    #[arg(long, short)]
    recursive: bool,
}

/// What a change answers.
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

/// A path travels as the bytes it is.
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
