//! `k8e sandbox ps`: lists the processes of a sandbox.

use crate::failure::Failure;
use crate::output;
use crate::table::{self, Column, Format, FormatArgs, Table};
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;

/// Arguments of `k8e sandbox ps`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox ps $SID | jq -r '.processes[] | \"\\(.pid) \\(.cmdline)\"'")]
pub struct PsArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,

    #[command(flatten)]
    format: FormatArgs,
}

const COLUMNS: [Column; 6] = [
    Column::new("PID"),
    Column::new("STATE"),
    Column::new("MEMORY"),
    Column::new("COMMAND"),
    Column::wide("PARENT"),
    Column::wide("UID"),
];

#[derive(Serialize)]
struct ProcessesJson {
    processes: Vec<ProcessJson>,
}

/// JSON output: `pid`, `comm` and `state` are keys of the Go K8E.
#[derive(Serialize)]
struct ProcessJson {
    pid: i32,
    ppid: i32,
    comm: String,
    state: String,
    cmdline: String,
    rss_bytes: u64,
    uid: u32,
}

// === impl PsArgs ===

impl PsArgs {
    /// Whether standard output is JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.format.is_json()
    }
}

pub(crate) async fn run(args: PsArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::ListProcessesRequest {
        session_id: args.session_id,
    };
    let processes = client.list_processes(request).await?.into_inner().processes;
    let processes: Vec<ProcessJson> = processes.into_iter().map(ProcessJson::from).collect();
    match args.format.chosen() {
        Format::Json => output::json(&ProcessesJson { processes })?,
        format @ (Format::Table | Format::Wide | Format::Name) => {
            table_of(&processes).print(format)?
        }
    }
    Ok(0)
}

fn table_of(processes: &[ProcessJson]) -> Table {
    let mut table = Table::new(&COLUMNS);
    for process in processes {
        // Kernel threads and zombies have no command line.
        let command = match process.cmdline.is_empty() {
            true => format!("[{}]", process.comm),
            false => process.cmdline.clone(),
        };
        table.row(vec![
            process.pid.to_string(),
            process.state.clone(),
            table::bytes(process.rss_bytes),
            command,
            process.ppid.to_string(),
            process.uid.to_string(),
        ]);
    }
    table
}

// === impl ProcessJson ===

impl From<v1::Process> for ProcessJson {
    fn from(process: v1::Process) -> Self {
        // Arguments are terminated by NUL; printed with spaces between them.
        let cmdline = String::from_utf8_lossy(&process.cmdline);
        Self {
            pid: process.pid,
            ppid: process.ppid,
            comm: process.comm,
            state: process.state,
            cmdline: cmdline.trim_end_matches('\0').replace('\0', " "),
            rss_bytes: process.rss_bytes,
            uid: process.uid,
        }
    }
}
