//! `k8e sandbox prune`: destroys sessions of the caller that have not been used for a while.

use crate::Globals;
use crate::connect;
use crate::failure::{EXIT_REQUEST, Failure};
use crate::output;
use crate::table;
use crate::units::{self, Span};
use clap::Args;
use k8e_api::client::Client;
use k8e_api::status::from_status;
use k8e_api::v1;
use k8e_model::{Code, Principal};
use serde::Serialize;
use std::io::{BufRead as _, IsTerminal as _};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// First paragraphs of `k8e sandbox prune --help`.
pub(super) const LONG_ABOUT: &str = "\
Destroy your sessions that have not been used for a while, with everything in them. Sessions with
background runs are kept, paused ones too unless --paused is given, and so are sessions of other owners.
Records of ended sessions need no pruning: the server removes them by itself.";

/// Arguments of `k8e sandbox prune`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox prune --dry-run
  k8e sandbox prune --idle 30m --yes

Output:
  {\"ok\":true,\"dry_run\":false,\"pruned\":[{\"session_id\":\"sess-…\",\"phase\":\"active\",\"idle_s\":7200}],\"kept\":2}")]
pub struct PruneArgs {
    /// Destroy sessions that were not used for so long
    #[arg(long, default_value = "1h", value_name = "TIME", value_parser = units::span)]
    idle: Span,

    /// Only sessions of this tenant
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,

    /// Destroy paused sessions too
    #[arg(long)]
    paused: bool,

    /// Print what would be destroyed, and destroy nothing
    #[arg(long)]
    dry_run: bool,

    /// Do not ask; needed where there is no terminal to ask at
    #[arg(long, short)]
    yes: bool,
}

/// A validated request.
#[derive(Debug)]
pub(crate) struct Prune {
    idle: Duration,
    tenant: String,
    paused: bool,
    dry_run: bool,
    yes: bool,
    /// Whether the server shows the caller the sessions of all owners.
    is_operator: bool,
}

#[derive(Serialize)]
struct PrunedJson {
    ok: bool,
    dry_run: bool,
    pruned: Vec<IdleJson>,
    kept: usize,
}

#[derive(Serialize)]
struct IdleJson {
    session_id: String,
    phase: String,
    idle_s: u64,
}

// === impl PruneArgs ===

impl PruneArgs {
    pub(crate) fn request(self, globals: &Globals) -> Result<Prune, Failure> {
        let Span::For(idle) = self.idle else {
            let error = "--idle never would prune nothing: write a time, as 30m or 2h";
            return Err(Failure::request(error, "invalid"));
        };
        if !self.yes && !self.dry_run && !std::io::stdin().is_terminal() {
            let error = "prune asks before it destroys sessions, and there is no terminal to ask at: \
                         add --yes, or --dry-run to see what it would destroy";
            return Err(Failure::request(error, "invalid"));
        }
        Ok(Prune {
            idle,
            tenant: self.tenant.unwrap_or_default(),
            paused: self.paused,
            dry_run: self.dry_run,
            yes: self.yes,
            is_operator: connect::is_operator(globals)?,
        })
    }
}

pub(crate) async fn run(prune: Prune, mut client: Client) -> Result<u8, Failure> {
    let request = v1::ListSessionsRequest {
        phase: "all".to_owned(),
        tenant: prune.tenant.clone(),
    };
    let listed = client.list_sessions(request).await?.into_inner().sessions;
    let (idle, kept): (Vec<_>, Vec<_>) = listed
        .into_iter()
        .filter(|session| session.phase != "ended" && prune.is_own(session))
        .partition(|session| prune.matches(session));
    let mut kept = kept.len();
    if !prune.dry_run && !prune.yes && !idle.is_empty() && !is_confirmed(&idle).await? {
        output::note("nothing was destroyed");
        return Ok(EXIT_REQUEST);
    }
    let mut pruned = Vec::new();
    for session in idle {
        let json = IdleJson {
            idle_s: idle_time(&session).as_secs(),
            session_id: session.session_id.clone(),
            phase: session.phase,
        };
        match prune.dry_run || destroy(&prune, &mut client, session.session_id).await? {
            true => pruned.push(json),
            false => kept += 1,
        }
    }
    output::json(&PrunedJson {
        ok: true,
        dry_run: prune.dry_run,
        pruned,
        kept,
    })
    .map(|()| 0)
}

/// Destroys a session unless it was used since it was listed; whether it did.
async fn destroy(prune: &Prune, client: &mut Client, session_id: String) -> Result<bool, Failure> {
    let request = v1::GetSessionRequest {
        session_id: session_id.clone(),
    };
    let now = match client.get_session(request).await {
        Ok(session) => session.into_inner(),
        // It ended with its parent, or by itself.
        Err(status) if from_status(&status).code == Code::NotFound => return Ok(true),
        Err(status) => return Err(status.into()),
    };
    if now.phase == "ended" {
        return Ok(true);
    }
    if !prune.matches(&now) {
        return Ok(false);
    }
    match client
        .destroy_session(v1::DestroySessionRequest { session_id })
        .await
    {
        Ok(_) => Ok(true),
        Err(status) if from_status(&status).code == Code::NotFound => Ok(true),
        Err(status) => Err(status.into()),
    }
}

/// Asks at the terminal.
async fn is_confirmed(idle: &[v1::Session]) -> Result<bool, Failure> {
    for session in idle {
        let unused = table::duration(idle_time(session).as_secs());
        output::note(&format!(
            "{} ({}), not used for {unused}",
            session.session_id, session.phase
        ));
    }
    output::prompt(&format!(
        "Destroy {} sessions with everything in them? [y/N] ",
        idle.len()
    ));
    let answer = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).map(|_| line)
    });
    let answer = answer
        .await
        .map_err(std::io::Error::other)
        .and_then(|line| line);
    let answer = answer.map_err(|e| Failure::io("read the answer", &e))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn idle_time(session: &v1::Session) -> Duration {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let used = Duration::from_millis(session.last_used_unix_ms.max(0).unsigned_abs());
    now.saturating_sub(used)
}

// === impl Prune ===

impl Prune {
    /// Operators see sessions of all owners, and theirs are those of `local`; others see only their own.
    fn is_own(&self, session: &v1::Session) -> bool {
        !self.is_operator || session.owner == Principal::local().name()
    }

    fn matches(&self, session: &v1::Session) -> bool {
        let is_idle_phase = session.phase == "active" || (self.paused && session.phase == "paused");
        is_idle_phase && session.background_runs == 0 && idle_time(session) >= self.idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(phase: &str, owner: &str, runs: u32, idle_s: i64) -> v1::Session {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        v1::Session {
            phase: phase.into(),
            owner: owner.into(),
            background_runs: runs,
            last_used_unix_ms: i64::try_from(now.as_millis()).unwrap() - idle_s * 1000,
            ..Default::default()
        }
    }

    #[test]
    fn only_own_idle_sessions_match() {
        let mut prune = Prune {
            idle: Duration::from_secs(60),
            tenant: String::new(),
            paused: false,
            dry_run: true,
            yes: false,
            is_operator: true,
        };
        assert!(prune.matches(&session("active", "local", 0, 61)));
        assert!(!prune.matches(&session("active", "local", 0, 50)));
        assert!(!prune.matches(&session("active", "local", 1, 61)));
        assert!(!prune.matches(&session("paused", "local", 0, 61)));
        assert!(!prune.matches(&session("creating", "local", 0, 61)));
        assert!(prune.is_own(&session("active", "local", 0, 61)));
        assert!(!prune.is_own(&session("active", "user:ann", 0, 61)));
        prune.paused = true;
        assert!(prune.matches(&session("paused", "local", 0, 61)));
        prune.is_operator = false;
        assert!(prune.is_own(&session("active", "user:ann", 0, 61)));
    }
}
