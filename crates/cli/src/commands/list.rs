//! `k8e sandbox list`: lists files of the workspace.

use super::files::path_bytes;
use crate::failure::Failure;
use crate::output;
use crate::render::FileJson;
use crate::table::{self, Column, Format, FormatArgs, Table};
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;
use std::ffi::OsString;

/// Arguments of `k8e sandbox list`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox list $SID | jq -r '.files[].path'
  k8e sandbox list $SID src --recursive=false
  k8e sandbox list $SID -o table
  k8e sandbox list $SID --since $(date -d '5 minutes ago' +%s)")]
pub struct ListArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,

    /// Directory to list
    #[arg(default_value = "/workspace")]
    path: OsString,

    /// Only files modified since this time, in Unix seconds
    #[arg(long, default_value_t = 0, value_name = "TIME")]
    since: i64,

    /// Include subdirectories
    #[arg(
        long,
        default_value_t = true,
        default_missing_value = "true",
        num_args = 0..=1,
        require_equals = true,
        action = clap::ArgAction::Set,
        value_name = "BOOL"
    )]
    recursive: bool,

    /// Largest number of files to print; `truncated` is true when there are more
    #[arg(long, default_value_t = 10_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    limit: u32,

    #[command(flatten)]
    format: FormatArgs,
}

const COLUMNS: [Column; 8] = [
    Column::new("PATH"),
    Column::new("TYPE"),
    Column::new("SIZE"),
    Column::new("MODE"),
    Column::new("AGE"),
    Column::wide("UID"),
    Column::wide("GID"),
    Column::wide("LINK TO"),
];

#[derive(Serialize)]
struct ListJson {
    files: Vec<FileJson>,
    /// Whether the list was cut at --limit.
    truncated: bool,
}

// === impl ListArgs ===

impl ListArgs {
    /// Whether standard output is JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.format.is_json()
    }
}

pub(crate) async fn run(args: ListArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::ListFilesRequest {
        session_id: args.session_id,
        path: path_bytes(args.path),
        recursive: args.recursive,
        since_unix_s: args.since,
    };
    let mut pages = client.list_files(request).await?.into_inner();
    let mut list = ListJson {
        files: Vec::new(),
        truncated: false,
    };
    let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
    // Dropping the stream cancels the call, and so the listing in the sandbox.
    while !list.truncated
        && let Some(page) = pages.message().await?
    {
        let room = limit - list.files.len();
        list.truncated = page.truncated || page.files.len() > room;
        let files = page.files.into_iter().take(room).map(FileJson::from);
        list.files.extend(files);
    }
    if list.truncated {
        output::note(&format!(
            "the list ends after {} files: name a directory, or raise --limit (100000 at most)",
            list.files.len()
        ));
    }
    match args.format.chosen() {
        Format::Json => output::json(&list)?,
        format @ (Format::Table | Format::Wide | Format::Name) => {
            table_of(&list.files).print(format)?
        }
    }
    Ok(0)
}

fn table_of(files: &[FileJson]) -> Table {
    let mut table = Table::new(&COLUMNS);
    for file in files {
        table.row(vec![
            file.path.clone(),
            file.r#type.clone(),
            table::bytes(file.size),
            file.mode.clone(),
            table::ago(file.modified),
            file.uid.to_string(),
            file.gid.to_string(),
            file.symlink_target.clone().unwrap_or_default(),
        ]);
    }
    table
}
