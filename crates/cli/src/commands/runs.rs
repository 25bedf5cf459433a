//! `k8e sandbox poll`, `runs` and `cancel`: background runs, started with `run --background`.

use super::stream::exit_code;
use crate::failure::{EXIT_REQUEST, Failure};
use crate::output::{self, Raw};
use crate::render::Text;
use crate::table::{self, Column, Format, FormatArgs, Table};
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1::{self, watch_run_response::Event};
use serde::Serialize;

/// Status of a run in progress.
const RUNNING: &str = "running";

/// First paragraphs of `k8e sandbox poll --help`.
pub(super) const LONG_ABOUT: &str = "\
Show status and output of a background run: the first MiB of standard output and of standard error.
Available for a while after its session has ended, and after a restart of the server.";

/// Arguments of `k8e sandbox poll`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  RUN=$(k8e sandbox run --background 'make test' | jq -r .run_id)
  k8e sandbox poll $RUN | jq -r .status
  k8e sandbox poll $RUN --wait
  k8e sandbox poll $RUN --follow

Output:
  {\"run_id\":\"run-…\",\"status\":\"running\",\"stdout\":\"…\",\"stderr\":\"\",…}
  status is running, completed, timed_out, oom_killed, cancelled, failed or lost.
  exit_code and signal are present once it has ended.")]
pub struct PollArgs {
    /// Id of the run, as `run --background` printed it
    #[arg(value_name = "RUN")]
    run_id: String,

    /// Wait until the run has ended
    #[arg(long, conflicts_with = "follow")]
    wait: bool,

    /// Stream its output as bytes instead of JSON, and exit with its exit code
    #[arg(long, short)]
    follow: bool,
}

/// Arguments of `k8e sandbox runs`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox runs $SID | jq -r '.runs[] | select(.status == \"running\") | .run_id'")]
pub struct RunsArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,

    #[command(flatten)]
    format: FormatArgs,
}

const COLUMNS: [Column; 8] = [
    Column::new("RUN"),
    Column::new("STATUS"),
    Column::new("EXIT"),
    Column::new("TIME"),
    Column::new("STARTED"),
    Column::new("PROGRAM"),
    Column::wide("SESSION"),
    Column::wide("REASON"),
];

/// Arguments of `k8e sandbox cancel`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Kills all processes that the run started. Has no effect on a run that has ended.

Example:
  k8e sandbox cancel $RUN")]
pub struct CancelArgs {
    /// Id of the run, as `run --background` printed it
    #[arg(value_name = "RUN")]
    run_id: String,
}

#[derive(Serialize)]
struct RunsJson {
    runs: Vec<SummaryJson>,
}

/// A run without its output.
#[derive(Serialize)]
struct SummaryJson {
    run_id: String,
    session_id: String,
    status: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
    program: String,
    /// `None` while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    duration_ms: u64,
    truncated: bool,
    /// Unix seconds; `ended_at` is 0 while it runs.
    started_at: i64,
    ended_at: i64,
}

/// JSON output: the keys of the Go K8E, and more.
#[derive(Serialize)]
struct RunJson {
    stdout: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stdout_base64: Option<String>,
    stderr: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stderr_base64: Option<String>,
    /// `None` while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    signal: Option<i32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    limits_hit: Vec<String>,
    #[serde(flatten)]
    summary: SummaryJson,
}

// === impl RunsArgs ===

impl RunsArgs {
    /// Whether standard output is JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.format.is_json()
    }
}

// === impl PollArgs ===

impl PollArgs {
    pub(crate) fn raw(&self) -> bool {
        self.follow
    }
}

pub(crate) async fn poll(args: PollArgs, mut client: Client) -> Result<u8, Failure> {
    if args.wait || args.follow {
        let exit = wait(&args, &mut client).await?;
        if args.follow {
            return Ok(exit);
        }
    }
    let request = v1::GetRunRequest {
        run_id: args.run_id,
    };
    let run = client.get_run(request).await?.into_inner();
    output::json(&RunJson::from(run)).map(|()| 0)
}

pub(crate) async fn list(args: RunsArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::ListRunsRequest {
        session_id: args.session_id,
    };
    let runs = client.list_runs(request).await?.into_inner().runs;
    let runs: Vec<SummaryJson> = runs.iter().map(SummaryJson::from).collect();
    match args.format.chosen() {
        Format::Json => output::json(&RunsJson { runs })?,
        format @ (Format::Table | Format::Wide | Format::Name) => table_of(&runs).print(format)?,
    }
    Ok(0)
}

pub(crate) async fn cancel(args: CancelArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::CancelRunRequest {
        run_id: args.run_id,
    };
    let run = client.cancel_run(request).await?.into_inner();
    output::json(&RunJson::from(run)).map(|()| 0)
}

/// Waits for the end of a run, streams its output with --follow, and returns its exit code.
async fn wait(args: &PollArgs, client: &mut Client) -> Result<u8, Failure> {
    let request = v1::WatchRunRequest {
        run_id: args.run_id.clone(),
    };
    let mut events = client.watch_run(request).await?.into_inner();
    let mut raw = Raw::new();
    while let Some(event) = events.message().await? {
        match event.event {
            Some(Event::Stdout(bytes)) if args.follow => raw.stdout(&bytes).await?,
            Some(Event::Stderr(bytes)) if args.follow => raw.stderr(&bytes).await?,
            Some(Event::Ended(run)) => {
                if args.follow && !run.reason.is_empty() {
                    output::note(&format!("the run was {}: {}", run.status, run.reason));
                }
                return Ok(exit_code(run.exit_code));
            }
            Some(Event::Stdout(_) | Event::Stderr(_)) | None => {}
        }
    }
    Ok(EXIT_REQUEST)
}

fn table_of(runs: &[SummaryJson]) -> Table {
    let mut table = Table::new(&COLUMNS);
    for run in runs {
        table.row(vec![
            run.run_id.clone(),
            run.status.clone(),
            run.exit_code
                .map(|code| code.to_string())
                .unwrap_or_default(),
            table::duration(run.duration_ms / 1000),
            table::ago(run.started_at),
            run.program.clone(),
            run.session_id.clone(),
            run.reason.clone(),
        ]);
    }
    table
}

// === impl SummaryJson ===

impl From<&v1::BackgroundRun> for SummaryJson {
    fn from(run: &v1::BackgroundRun) -> Self {
        Self {
            run_id: run.run_id.clone(),
            session_id: run.session_id.clone(),
            status: run.status.clone(),
            reason: run.reason.clone(),
            program: run.program.clone(),
            exit_code: (run.status != RUNNING).then_some(run.exit_code),
            duration_ms: run.duration_us / 1000,
            truncated: run.stdout_truncated || run.stderr_truncated,
            started_at: run.started_at_unix_ms / 1000,
            ended_at: run.ended_at_unix_ms / 1000,
        }
    }
}

// === impl RunJson ===

impl From<v1::BackgroundRun> for RunJson {
    fn from(run: v1::BackgroundRun) -> Self {
        let summary = SummaryJson::from(&run);
        let (stdout, stderr) = (
            Text::from(Vec::from(run.stdout)),
            Text::from(Vec::from(run.stderr)),
        );
        Self {
            stdout: stdout.text,
            stdout_base64: stdout.base64,
            stderr: stderr.text,
            stderr_base64: stderr.base64,
            signal: summary.exit_code.map(|_| run.signal),
            limits_hit: run.limits_hit,
            summary,
        }
    }
}
