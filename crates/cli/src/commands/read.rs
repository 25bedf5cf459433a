//! `k8e sandbox read`: reads a file of the workspace.

use super::files::path_bytes;
use crate::failure::Failure;
use crate::output::{self, Raw};
use crate::render::Text;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1::{self, read_file_response::Message};
use serde::Serialize;
use std::ffi::OsString;

/// Largest file that is printed as JSON; --raw has no limit.
const JSON_BYTES_MAX: usize = 16 * 1024 * 1024;

/// First paragraphs of `k8e sandbox read --help`.
pub(super) const LONG_ABOUT: &str = "\
Read a file below /workspace. As JSON by default, with content_base64 when it is not text;
with --raw byte for byte and of any size.";

/// Arguments of `k8e sandbox read`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox read $SID result.json --raw | jq .
  k8e sandbox read $SID model.bin --raw > model.bin
  k8e sandbox read $SID app.log --raw --offset 1000000")]
pub struct ReadArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,

    /// Path of the file, absolute or relative to /workspace; nothing outside /workspace
    path: OsString,

    /// Print the content as bytes instead of JSON
    #[arg(long)]
    raw: bool,

    /// Byte offset to start at
    #[arg(long, default_value_t = 0, value_name = "BYTE")]
    offset: u64,

    /// Number of bytes to read; 0 for all up to the end
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    length: u64,
}

#[derive(Serialize)]
struct ReadJson {
    content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_base64: Option<String>,
    path: String,
}

// === impl ReadArgs ===

impl ReadArgs {
    pub(crate) fn raw(&self) -> bool {
        self.raw
    }
}

pub(crate) async fn run(args: ReadArgs, mut client: Client) -> Result<u8, Failure> {
    let path = Text::from(args.path.as_encoded_bytes().to_vec()).text;
    let request = v1::ReadFileRequest {
        session_id: args.session_id,
        path: path_bytes(args.path),
        offset: args.offset,
        length: args.length,
    };
    let mut messages = client.read_file(request).await?.into_inner();
    let mut raw = args.raw.then(Raw::new);
    let mut content = Vec::new();
    while let Some(message) = messages.message().await? {
        let Some(Message::Data(data)) = message.message else {
            continue;
        };
        match &mut raw {
            Some(raw) => raw.stdout(&data).await?,
            None if content.len() + data.len() > JSON_BYTES_MAX => {
                return Err(Failure::request(
                    format!("{path} is larger than {JSON_BYTES_MAX} bytes: read it with --raw"),
                    "invalid",
                ));
            }
            None => content.extend_from_slice(&data),
        }
    }
    if raw.is_none() {
        let content = Text::from(content);
        output::json(&ReadJson {
            content: content.text,
            content_base64: content.base64,
            path,
        })?;
    }
    Ok(0)
}
