//! How long things take: every round measures every subject once, in turn.
//!
//! Machines differ and get busy, so nothing is compared across runs: what disturbs one subject
//! disturbs its baseline as well. Each runtime has rounds of its own, with the programs of the host
//! that it is held against: a container of runsc is never idle, and would disturb everybody else.

use super::bar::{Bar, Ratio, Verdict};
use super::host::{Programs, time};
use super::server::{Server, Start};
use super::stats::Times;
use super::subject::{Action, Host, Subject};
use crate::failure::Failure;
use crate::output;
use k8e_api::v1;
use k8e_model::RuntimeKind;
use serde::Serialize;
use std::process::Command;
use std::time::{Duration, Instant};

/// Rounds that are not counted: caches fill, pools grow to what is asked of them.
const WARMUP_ROUNDS: u32 = 3;

/// What the rounds came to.
#[derive(Debug, Serialize)]
pub(super) struct Latency {
    pub(super) rounds: u32,
    pub(super) subjects: Vec<Row>,
    pub(super) pools: Vec<PoolUse>,
}

/// One subject.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    /// The host's, or a runtime's.
    pub(super) group: &'static str,
    pub(super) name: &'static str,
    pub(super) measured: usize,
    pub(super) p50_ms: f64,
    pub(super) p95_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) ratios: Vec<Ratio>,
}

/// How often a session got a warm sandbox while the rounds ran.
#[derive(Debug, Serialize)]
pub(super) struct PoolUse {
    pub(super) runtime: String,
    pub(super) hits: u64,
    pub(super) misses: u64,
    /// None when nothing was claimed.
    pub(super) hit_rate: Option<f64>,
    #[serde(flatten)]
    pub(super) verdict: Verdict,
}

/// All that a measurement needs.
struct Bench<'a> {
    programs: &'a Programs,
    server: Server,
    runtime: RuntimeKind,
    /// A live session.
    live: String,
}

/// Measures everything `rounds` times.
pub(super) async fn measure(
    programs: &Programs,
    server: &Server,
    runtime: RuntimeKind,
    rounds: u32,
    notes: &mut Vec<String>,
) -> Result<Latency, Failure> {
    let mut server = server.clone();
    let live = server.create(runtime, Start::Warm).await?;
    let mut bench = Bench {
        programs,
        server,
        runtime,
        live,
    };
    let before = bench.server.pools(&[runtime]).await?;
    let mut series = subjects(programs.usable(), runtime, &before, notes);
    for round in 0..WARMUP_ROUNDS + rounds {
        let told = (round + 1).saturating_sub(WARMUP_ROUNDS);
        output::progress(&format!("latency of {runtime}: round {told} of {rounds}"));
        for (subject, times) in &mut series {
            bench.server.settle(&[runtime]).await?;
            let took = bench.measure(*subject).await?;
            if round >= WARMUP_ROUNDS {
                times.add(took);
            }
        }
    }
    let after = bench.server.pools(&[runtime]).await?;
    bench.server.destroy(bench.live).await?;
    Ok(Latency {
        rounds,
        subjects: rows(&series),
        pools: pool_use(&before, &after),
    })
}

/// What can be measured here.
fn subjects(
    hosts: &[Host],
    runtime: RuntimeKind,
    pools: &[v1::Pool],
    notes: &mut Vec<String>,
) -> Vec<(Subject, Times)> {
    let pooled = pools.iter().any(|pool| pool.runtime == runtime.as_str());
    if !pooled {
        notes.push(format!(
            "the server keeps no warm {runtime} sandboxes, so all are cold: start it without --pool-max 0"
        ));
    }
    let hosts = hosts.iter().map(|host| Subject::Host(*host));
    let ours = Action::ALL
        .into_iter()
        .filter(|action| pooled || *action != Action::Claim)
        .map(|action| Subject::Ours(runtime, action));
    let empty = |subject| (subject, Times::default());
    hosts.chain(ours).map(empty).collect()
}

// === impl Latency ===

impl Latency {
    /// Adds the rounds of another runtime.
    pub(super) fn add(&mut self, other: Self) {
        self.subjects.extend(other.subjects);
        self.pools.extend(other.pools);
    }
}

// === impl Bench ===

impl Bench<'_> {
    /// Does it once. What belongs to it is in the time, what only cleans up is not.
    async fn measure(&mut self, subject: Subject) -> Result<Duration, Failure> {
        match subject {
            Subject::Host(host) => self.programs.time(host),
            Subject::Ours(_, action) => self.act(action).await,
        }
    }

    async fn act(&mut self, action: Action) -> Result<Duration, Failure> {
        let (runtime, live) = (self.runtime, self.live.clone());
        let server = &mut self.server;
        let begin = Instant::now();
        match action {
            Action::Create => Self::create(server, runtime, Start::Cold).await,
            Action::Claim => Self::create(server, runtime, Start::Warm).await,
            Action::Exec => {
                server.exec_true(live).await?;
                Ok(begin.elapsed())
            }
            Action::Whole => {
                let session_id = server.create(runtime, Start::Warm).await?;
                server.exec_true(session_id.clone()).await?;
                server.destroy(session_id).await?;
                Ok(begin.elapsed())
            }
            Action::Cli => cli(server.cli_fresh(runtime, "echo hi")),
            Action::Python => cli(server.cli_python(&live, "print(1)")),
        }
    }

    /// Up to a session that can be used; its end is not part of it.
    async fn create(
        server: &mut Server,
        runtime: RuntimeKind,
        start: Start,
    ) -> Result<Duration, Failure> {
        let begin = Instant::now();
        let session_id = server.create(runtime, start).await?;
        let took = begin.elapsed();
        server.destroy(session_id).await?;
        Ok(took)
    }
}

fn cli(mut command: Command) -> Result<Duration, Failure> {
    time(&mut command).map_err(|e| Failure::io("measure k8e sandbox run", &e))
}

/// With each held against its limits.
fn rows(series: &[(Subject, Times)]) -> Vec<Row> {
    let p50 = |host: Host| {
        let of = series
            .iter()
            .find(|(subject, _)| *subject == Subject::Host(host));
        of.map(|(_, times)| times.percentile_ms(50))
    };
    let row = |(subject, times): &(Subject, Times)| {
        let ratio = |limit: super::subject::Limit| {
            let of = if limit.percent == 50 { "p50" } else { "p99" };
            let figure = times.percentile_ms(limit.percent);
            Ratio::new(
                of,
                figure,
                limit.baseline.name(),
                p50(limit.baseline),
                limit.bar,
            )
        };
        Row {
            group: subject.group(),
            name: subject.name(),
            measured: times.count(),
            p50_ms: times.percentile_ms(50),
            p95_ms: times.percentile_ms(95),
            p99_ms: times.percentile_ms(99),
            ratios: subject.limits().into_iter().map(ratio).collect(),
        }
    };
    series.iter().map(row).collect()
}

fn pool_use(before: &[v1::Pool], after: &[v1::Pool]) -> Vec<PoolUse> {
    let used = |after: &v1::Pool| {
        let same =
            |pool: &&v1::Pool| (&pool.runtime, &pool.template) == (&after.runtime, &after.template);
        let (hits, misses) = before
            .iter()
            .find(same)
            .map_or((0, 0), |pool| (pool.hits, pool.misses));
        let (hits, misses) = (
            after.hits.saturating_sub(hits),
            after.misses.saturating_sub(misses),
        );
        let all = hits + misses;
        let hit_rate = (all > 0).then(|| hits as f64 / all as f64);
        PoolUse {
            runtime: after.runtime.clone(),
            hits,
            misses,
            hit_rate,
            verdict: Verdict::new(hit_rate, Some(Bar::AtLeast(1.0))),
        }
    };
    after.iter().map(used).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(ms: u64) -> Times {
        let mut times = Times::default();
        times.add(Duration::from_millis(ms));
        times
    }

    #[test]
    fn ratios_are_to_the_same_run() {
        let claim = Subject::Ours(RuntimeKind::Native, Action::Claim);
        let cold = Subject::Ours(RuntimeKind::Native, Action::Create);
        let rows = rows(&[
            (Subject::Host(Host::ForkExec), times(2)),
            (claim, times(5)),
            (cold, times(5)),
        ]);
        assert!(rows[0].ratios.is_empty());
        let texts: Vec<String> = rows[1].ratios.iter().map(Ratio::text).collect();
        let expected = [
            "2.50 × fork+exec, ≤ 1.00 MISSED",
            "p99 2.50 × fork+exec, ≤ 5.00 ok",
        ];
        assert_eq!(texts, expected);
        // Bubblewrap is not there.
        assert_eq!(rows[2].ratios[0].ratio, None);
    }

    #[test]
    fn hits_are_those_of_the_run() {
        let pool = |hits, misses| v1::Pool {
            runtime: "native".to_owned(),
            hits,
            misses,
            ..Default::default()
        };
        let used = |before, after| pool_use(&[before], &[after]).remove(0);
        let all = used(pool(10, 5), pool(30, 5));
        assert_eq!((all.hits, all.misses, all.hit_rate), (20, 0, Some(1.0)));
        assert_eq!(all.verdict.met(), Some(true));
        let some = used(pool(0, 0), pool(3, 1));
        assert_eq!(
            (some.hit_rate, some.verdict.met()),
            (Some(0.75), Some(false))
        );
        let none = used(pool(1, 1), pool(1, 1));
        assert_eq!((none.hit_rate, none.verdict.met()), (None, None));
    }

    #[test]
    fn without_a_pool_nothing_is_warm() {
        let mut notes = Vec::new();
        let none = subjects(&[], RuntimeKind::Native, &[], &mut notes);
        let claim = Subject::Ours(RuntimeKind::Native, Action::Claim);
        assert!(none.iter().all(|(subject, _)| *subject != claim));
        assert!(notes[0].contains("--pool-max"), "{notes:?}");
    }
}
