//! `k8e bench`: what a sandbox costs here, next to what the machine itself costs.
//!
//! Machines differ and get busy, so nothing is compared across runs: every round measures every
//! subject once, in turn, and the table shows ratios to fork+exec and to bubblewrap of that run.

mod report;
mod subject;

use crate::Globals;
use crate::connect::connect;
use crate::failure::Failure;
use crate::output;
use clap::Args;
use report::Report;
use subject::Bench;

/// Rounds that are not counted: caches fill, connections open.
const WARMUP_ROUNDS: u32 = 3;

/// Arguments of `k8e bench`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e bench
  k8e bench --iterations 1000 --json | jq '.subjects[] | {name, p50_ms}'")]
pub struct BenchArgs {
    /// How often each is measured
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    iterations: u32,

    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(args: BenchArgs, globals: &Globals) -> Result<u8, Failure> {
    let mut bench = Bench::start(connect(globals).await?, globals).await?;
    let mut report = Report::new(bench.subjects());
    let result = rounds(&mut bench, &mut report, args.iterations).await;
    // The session goes whether or not the rounds went well.
    bench.end().await?;
    result?;
    if args.json {
        output::json(&report.json())?;
    } else {
        output::text(report.table().as_bytes())?;
    }
    Ok(0)
}

async fn rounds(bench: &mut Bench, report: &mut Report, iterations: u32) -> Result<(), Failure> {
    for round in 0..WARMUP_ROUNDS + iterations {
        for subject in bench.subjects() {
            let took = bench.measure(subject).await?;
            if round >= WARMUP_ROUNDS {
                report.add(subject, took);
            }
        }
    }
    Ok(())
}
