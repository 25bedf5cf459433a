//! What many live sandboxes cost, and whether claims stay quick among them.

use super::bar::{Bar, Ratio, Verdict};
use super::memory::{DataDir, Mean};
use super::server::{Server, Start, joined};
use super::stats::Times;
use crate::failure::Failure;
use crate::output;
use k8e_model::RuntimeKind;
use serde::Serialize;
use std::time::Instant;
use tokio::task::JoinSet;

/// Claims at each count, whatever the number of rounds.
const CLAIMS_MIN: u32 = 30;
const CLAIMS_MAX: u32 = 300;

/// The count whose claims the others are compared with.
const CLAIM_BASE: u32 = 10;

/// Sessions made at once: enough to keep the server busy.
const CREATED_AT_ONCE: usize = 4;

/// What the server itself may take.
const SERVER_MB: Bar = Bar::AtMost(250.0);
const CLAIM_GROWTH: Bar = Bar::AtMost(2.0);

/// How many sandboxes of which runtime.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) runtime: RuntimeKind,
    pub(super) counts: Vec<u32>,
}

/// What one count came to.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) runtime: RuntimeKind,
    pub(super) live: u32,
    pub(super) memory: Option<Memory>,
    pub(super) server: Option<ServerMemory>,
    pub(super) claims: usize,
    pub(super) claim_p50_ms: f64,
    /// None at the count that it would be compared with.
    pub(super) claim: Option<Ratio>,
}

/// The mean over all sandboxes of the runtime, those that wait in the pool included.
#[derive(Debug, Serialize)]
pub(super) struct Memory {
    pub(super) sandboxes: usize,
    pub(super) pss_mb: f64,
    pub(super) kernel_mb: Option<f64>,
    pub(super) each_mb: f64,
    #[serde(flatten)]
    pub(super) verdict: Verdict,
}

/// Resident memory of the server's process.
#[derive(Debug, Serialize)]
pub(super) struct ServerMemory {
    pub(super) rss_mb: f64,
    #[serde(flatten)]
    pub(super) verdict: Verdict,
}

/// Fills up to each count of each plan. What cannot be measured is told in `notes`.
pub(super) async fn measure(
    server: &Server,
    data_dir: &Result<DataDir, String>,
    plans: &[Plan],
    rounds: u32,
    notes: &mut Vec<String>,
) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    let claims = rounds.clamp(CLAIMS_MIN, CLAIMS_MAX);
    for plan in plans {
        let mut crowd = Crowd {
            server: server.clone(),
            runtime: plan.runtime,
            live: 0,
        };
        let others = crowd.server.sessions_active().await?;
        if others > 0 {
            notes.push(format!(
                "{others} sessions of others live on this server: their memory is counted too"
            ));
        }
        let mut claim_base = None;
        for count in &plan.counts {
            let runtime = plan.runtime;
            output::progress(&format!("density: {count} live {runtime} sandboxes"));
            if let Err(failure) = crowd.grow_to(*count).await {
                notes.push(refused(*count, runtime, failure)?);
                break;
            }
            let memory = match data_dir {
                Ok(dir) => dir
                    .sandboxes(runtime)
                    .and_then(|mean| Ok((mean, dir.server_mb()?))),
                Err(why) => Err(why.clone()),
            };
            let memory = memory.map_err(|why| {
                notes.push(format!(
                    "memory of {runtime} sandboxes is not measured: {why}"
                ));
            });
            let times = crowd.claims(claims).await?;
            if *count == CLAIM_BASE {
                claim_base = Some(times.percentile_ms(50));
            }
            rows.push(row(runtime, *count, memory.ok(), &times, claim_base));
        }
        crowd.server.destroy_all().await?;
    }
    Ok(rows)
}

/// The live sessions of one runtime.
struct Crowd {
    server: Server,
    runtime: RuntimeKind,
    live: u32,
}

// === impl Crowd ===

impl Crowd {
    async fn grow_to(&mut self, count: u32) -> Result<(), Failure> {
        let mut creates = JoinSet::new();
        while self.live < count {
            if creates.len() >= CREATED_AT_ONCE {
                joined(creates.join_next().await)?;
            }
            let (mut server, runtime) = (self.server.clone(), self.runtime);
            creates.spawn(async move { server.create(runtime, Start::Warm).await });
            self.live += 1;
        }
        while let Some(created) = creates.join_next().await {
            joined(Some(created))?;
        }
        // What is being made for the pool is not idle.
        self.server.settle(&[self.runtime]).await
    }

    async fn claims(&mut self, claims: u32) -> Result<Times, Failure> {
        let mut times = Times::default();
        for _ in 0..claims {
            self.server.settle(&[self.runtime]).await?;
            let begin = Instant::now();
            let session_id = self.server.create(self.runtime, Start::Warm).await?;
            times.add(begin.elapsed());
            self.server.destroy(session_id).await?;
        }
        Ok(times)
    }
}

/// The other parts are worth telling, also where there is no room for this many.
fn refused(count: u32, runtime: RuntimeKind, failure: Failure) -> Result<String, Failure> {
    match failure {
        Failure::Told { error, detail, .. } if detail == "exhausted" => {
            // Those of the pool, of the claims and of others need room too.
            let sessions = count + 100;
            Ok(format!(
                "{count} live {runtime} sandboxes are not measured: {error}; start the server with --max-sessions {sessions}"
            ))
        }
        failure @ (Failure::Told { .. } | Failure::BrokenPipe) => Err(failure),
    }
}

fn row(
    runtime: RuntimeKind,
    live: u32,
    memory: Option<(Mean, f64)>,
    times: &Times,
    claim_base: Option<f64>,
) -> Row {
    let claim_p50_ms = times.percentile_ms(50);
    let native = runtime == RuntimeKind::Native;
    let bar = (native && live > CLAIM_BASE).then_some(CLAIM_GROWTH);
    let baseline = format!("at {CLAIM_BASE} live");
    let claim = (live != CLAIM_BASE)
        .then(|| Ratio::new("p50", claim_p50_ms, &baseline, claim_base, bar))
        .filter(|ratio| ratio.ratio.is_some());
    Row {
        runtime,
        live,
        memory: memory.map(|(mean, _)| Memory {
            sandboxes: mean.sandboxes,
            pss_mb: mean.pss_mb,
            kernel_mb: mean.kernel_mb,
            each_mb: mean.each_mb(),
            verdict: Verdict::new(Some(mean.each_mb()), memory_bar(runtime, live)),
        }),
        server: memory.map(|(_, rss_mb)| ServerMemory {
            rss_mb,
            verdict: Verdict::new(Some(rss_mb), native.then_some(SERVER_MB)),
        }),
        claims: times.count(),
        claim_p50_ms,
        claim,
    }
}

/// What few of them share counts more for each, so the bars are for many.
fn memory_bar(runtime: RuntimeKind, live: u32) -> Option<Bar> {
    match runtime {
        RuntimeKind::Native if live >= 500 => Some(Bar::AtMost(4.0)),
        RuntimeKind::Gvisor if live >= 100 => Some(Bar::AtMost(16.0)),
        RuntimeKind::Native
        | RuntimeKind::Gvisor
        | RuntimeKind::Firecracker
        | RuntimeKind::Kata => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn times(ms: u64) -> Times {
        let mut times = Times::default();
        times.add(Duration::from_millis(ms));
        times
    }

    #[test]
    fn bars_are_for_many() {
        let mean = Mean {
            sandboxes: 500,
            pss_mb: 3.0,
            kernel_mb: Some(1.5),
        };
        let at = |runtime, live| row(runtime, live, Some((mean, 100.0)), &times(3), Some(2.0));
        let few = at(RuntimeKind::Native, 100);
        assert_eq!(few.memory.unwrap().verdict.met(), None);
        let many = at(RuntimeKind::Native, 500);
        let memory = many.memory.unwrap();
        assert_eq!((memory.each_mb, memory.verdict.met()), (4.5, Some(false)));
        assert_eq!(many.server.unwrap().verdict.met(), Some(true));
        let claim = many.claim.unwrap();
        assert_eq!((claim.ratio, claim.verdict.met()), (Some(1.5), Some(true)));
        let gvisor = at(RuntimeKind::Gvisor, 100);
        assert_eq!(gvisor.memory.unwrap().verdict.met(), Some(true));
        assert!(at(RuntimeKind::Native, 10).claim.is_none());
        // Nobody measured it at ten.
        let alone = row(RuntimeKind::Native, 500, None, &times(3), None);
        assert!(alone.claim.is_none() && alone.memory.is_none());
    }

    #[test]
    fn who_has_no_room_is_told_which_flag_makes_some() {
        let full = Failure::request("1000 sessions are alive", "exhausted");
        let note = refused(1200, RuntimeKind::Native, full).unwrap();
        assert!(note.contains("--max-sessions 1300"), "{note}");
        assert!(refused(1, RuntimeKind::Native, Failure::request("no", "internal")).is_err());
    }
}
