//! `k8e sandbox watch`: changes in a directory of the workspace, one JSON object per line.

use super::files::path_bytes;
use crate::failure::Failure;
use crate::output;
use crate::render::Text;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;
use std::ffi::OsString;

/// Description of `k8e sandbox watch --help`.
pub(crate) const LONG_ABOUT: &str = "\
Watch a directory of the workspace: prints each change as one JSON object per line, until the command
is interrupted or the session ends.

The first line has the type `started`: changes are reported from then on. The others are create,
write, remove, chmod (also owner and times), and rename_from and rename_to, which have the same
rename_id; paths are relative to PATH. The type `overflow` means that events were lost, because they
came faster than they were read: list the directory again.";

/// Arguments of `k8e sandbox watch`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox watch $SID .
  k8e sandbox watch $SID src --recursive | jq -r 'select(.type == \"write\") | .path'")]
pub struct WatchArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,
    /// Path of the directory, absolute or relative to /workspace; nothing outside /workspace
    path: OsString,
    /// Watch all directories below too, also new ones
    #[arg(long, short)]
    recursive: bool,
}

/// One line of JSON output.
#[derive(Serialize)]
struct EventJson {
    r#type: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    directory: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rename_id: Option<u32>,
}

pub(crate) async fn run(args: WatchArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::WatchFilesRequest {
        session_id: args.session_id,
        path: path_bytes(args.path),
        recursive: args.recursive,
    };
    let mut responses = client.watch_files(request).await?.into_inner();
    let mut started = false;
    while let Some(response) = responses.message().await? {
        if !started {
            output::json(&EventJson::bare("started"))?;
            started = true;
        }
        for event in response.events {
            output::json(&EventJson::from(event))?;
        }
    }
    Ok(0)
}

// === impl EventJson ===

impl EventJson {
    fn bare(kind: &str) -> Self {
        Self {
            r#type: kind.to_owned(),
            path: None,
            path_base64: None,
            directory: None,
            rename_id: None,
        }
    }
}

impl From<v1::FileEvent> for EventJson {
    fn from(event: v1::FileEvent) -> Self {
        if event.path.is_empty() {
            return Self::bare(&event.r#type);
        }
        let path = Text::from(Vec::from(event.path));
        Self {
            r#type: event.r#type,
            path: Some(path.text),
            path_base64: path.base64,
            directory: Some(event.directory),
            rename_id: (event.rename_id != 0).then_some(event.rename_id),
        }
    }
}
