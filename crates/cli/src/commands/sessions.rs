//! `k8e sandbox sessions`: lists sessions, or watches them.

use crate::failure::Failure;
use crate::output;
use crate::render::SessionJson;
use crate::table::{self, Column, Format, FormatArgs, Table};
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Pause between two looks with --watch: soon enough for people, and little work for the server.
const WATCH_PAUSE: Duration = Duration::from_millis(500);

/// Arguments of `k8e sandbox sessions`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox sessions | jq -r '.sessions[].session_id'
  k8e sandbox sessions -o name
  k8e sandbox sessions --phase all --tenant my-project
  k8e sandbox sessions --watch | jq -r '\"\\(.type) \\(.session.session_id)\"'

With --watch, one JSON object per line:
  {\"type\":\"added\",\"session\":{…}}
  type is added for sessions that are there or appear, changed, and removed for those that end or
  leave the phase. `last_used` alone is no change. Ctrl-C ends it.")]
pub struct SessionsArgs {
    /// Only sessions in this phase: creating, active, paused, terminating, ended or all
    #[arg(long, default_value = "active", value_name = "PHASE")]
    phase: String,

    /// Only sessions of this tenant
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,

    /// Print sessions as they appear, change and end, until Ctrl-C
    #[arg(long, short)]
    watch: bool,

    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Serialize)]
struct SessionsJson {
    sessions: Vec<SessionJson>,
}

/// A line of --watch.
#[derive(Serialize)]
struct ChangeJson<'a> {
    r#type: &'static str,
    session: &'a SessionJson,
}

// === impl SessionsArgs ===

impl SessionsArgs {
    /// Whether standard output is JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.format.is_json()
    }

    fn request(&self) -> v1::ListSessionsRequest {
        v1::ListSessionsRequest {
            phase: self.phase.clone(),
            tenant: self.tenant.clone().unwrap_or_default(),
        }
    }
}

pub(crate) async fn run(args: SessionsArgs, mut client: Client) -> Result<u8, Failure> {
    if args.watch {
        return watch(&args, client).await;
    }
    let sessions = list(&mut client, &args).await?;
    match args.format.chosen() {
        Format::Json => output::json(&SessionsJson { sessions })?,
        format @ (Format::Table | Format::Wide | Format::Name) => {
            let mut table = Table::new(&COLUMNS);
            sessions.iter().map(row_of).for_each(|row| table.row(row));
            table.print(format)?;
        }
    }
    Ok(0)
}

async fn list(client: &mut Client, args: &SessionsArgs) -> Result<Vec<SessionJson>, Failure> {
    let listed = client.list_sessions(args.request()).await?.into_inner();
    Ok(listed.sessions.into_iter().map(SessionJson::from).collect())
}

/// Prints what is different from one listing to the next; ends with the connection, or with Ctrl-C.
async fn watch(args: &SessionsArgs, mut client: Client) -> Result<u8, Failure> {
    let format = args.format.chosen();
    let mut known: BTreeMap<String, SessionJson> = BTreeMap::new();
    let mut is_first = true;
    loop {
        let mut gone = std::mem::take(&mut known);
        let mut changes = Vec::new();
        for session in list(&mut client, args).await? {
            match gone.remove(&session.session_id) {
                None => changes.push(("added", session.clone())),
                Some(before) if !before.is_same(&session) => {
                    changes.push(("changed", session.clone()));
                }
                Some(_) => {}
            }
            known.insert(session.session_id.clone(), session);
        }
        changes.extend(gone.into_values().map(|session| ("removed", session)));
        for &(r#type, ref session) in &changes {
            match format {
                Format::Json => output::json(&ChangeJson { r#type, session })?,
                format @ (Format::Table | Format::Wide | Format::Name) => {
                    let mut table = Table::new(&WATCH_COLUMNS);
                    let mut row = row_of(session);
                    row.insert(1, r#type.to_owned());
                    table.row(row);
                    table.print_rows(format, is_first)?;
                    is_first = false;
                }
            }
        }
        tokio::time::sleep(WATCH_PAUSE).await;
    }
}

const COLUMNS: [Column; 9] = [
    Column::new("SESSION").at_least(25),
    Column::new("PHASE").at_least(11),
    Column::new("RUNTIME"),
    Column::new("TENANT").at_least(8),
    Column::new("AGE").at_least(4),
    Column::new("IDLE"),
    Column::wide("OWNER"),
    Column::wide("TEMPLATE"),
    Column::wide("MEMORY"),
];

/// The first column of --watch is what happened; with `-o name` that is the id all the same.
const WATCH_COLUMNS: [Column; 10] = {
    let [session, rest @ ..] = COLUMNS;
    let [a, b, c, d, e, f, g, h] = rest;
    [
        session,
        Column::new("CHANGE").at_least(7),
        a,
        b,
        c,
        d,
        e,
        f,
        g,
        h,
    ]
};

fn row_of(session: &SessionJson) -> Vec<String> {
    vec![
        session.session_id.clone(),
        session.phase.clone(),
        session.runtime.clone(),
        session.tenant_id.clone(),
        table::ago(session.created_at),
        table::ago(session.last_used),
        session.owner.clone(),
        session.template.clone(),
        table::bytes(session.limits.memory_bytes),
    ]
}
