//! `k8e bench`: benchmarks of sandboxes (latency, throughput, density), beside baselines on the same machine.
//!
//! Results are compared only within one run. Everything that a run creates (sessions, containers, files) is removed, also
//! when it is interrupted.

mod bar;
mod bundle;
mod density;
mod host;
mod latency;
mod machine;
mod memory;
mod report;
mod server;
mod stats;
mod subject;
mod svg;
#[cfg(target_os = "linux")]
mod sys;
mod throughput;

use crate::Globals;
use crate::connect::connect;
use crate::failure::{EXIT_INTERRUPTED, Failure};
use crate::output;
use clap::{Args, ValueEnum};
use density::Plan;
use host::Programs;
use k8e_api::v1;
use k8e_model::RuntimeKind;
use machine::Machine;
use memory::DataDir;
use report::Report;
use server::Server;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use subject::Host;
use throughput::Load;

/// Default numbers of live sandboxes for density. More need a server with a higher --max-sessions.
const LIVE_NATIVE: [u32; 3] = [1, 10, 100];
const LIVE_OTHER: [u32; 2] = [1, 10];

/// How long the signal may take that ended what was being measured.
const SIGNAL_WAIT: Duration = Duration::from_millis(200);

/// Arguments of `k8e bench`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e bench
  k8e bench --only latency --iterations 300 --svg latency.svg
  k8e bench --only density --live 1,10,100,500 --live-gvisor 1,10,100
  k8e bench --json | jq '.latency.subjects[] | {group, name, p50_ms}'

A bar is what we ask of ourselves: `≤ 2.00 ok` or `≤ 2.00 MISSED`. Absolute times are this
machine's; ratios say more. 500 live sandboxes need `k8e server --max-sessions 2000`.")]
pub struct BenchArgs {
    /// Run only this benchmark; may be repeated [default: all]
    #[arg(long, value_name = "PART", value_enum)]
    only: Vec<Part>,

    /// Measure only this runtime; may be repeated [default: all that work]
    #[arg(long, value_name = "KIND", value_parser = runtime)]
    runtime: Vec<RuntimeKind>,

    /// Iterations of each latency measurement
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    iterations: u32,

    /// Throughput: number of concurrent clients
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    clients: u32,

    /// Throughput: seconds for each measurement
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,

    /// Density: numbers of live native sandboxes [default: 1,10,100]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=100_000))]
    live: Vec<u32>,

    /// Density: numbers of live gVisor sandboxes [default: 1,10]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=100_000))]
    live_gvisor: Vec<u32>,

    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,

    /// Write a chart of the latencies (SVG) to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// The benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Latency: milliseconds to create, execute and run
    Latency,
    /// Throughput: sandboxes created, used and removed per second
    Throughput,
    /// Density: memory of many live sandboxes
    Density,
}

/// Measures, and removes what that made, whatever comes in between.
pub(crate) async fn run(args: BenchArgs, globals: &Globals) -> Result<u8, Failure> {
    if args.svg.is_some() && !args.wants(Part::Latency) {
        return Err(Failure::request(
            "--svg draws the latencies: leave out --only, or add --only latency",
            "invalid",
        ));
    }
    let mut client = connect(globals).await?;
    let status = client
        .get_status(v1::GetStatusRequest {})
        .await?
        .into_inner();
    let runtimes = runtimes(&args.runtime, &status)?;
    let mut server = Server::new(client, &status, globals)?;
    let mut report = Report::new(Machine::describe(&status.version));
    let mut stop = std::pin::pin!(interrupted());
    let measured = tokio::select! {
        // Signals are heard before the first thing is made.
        biased;
        () = &mut stop => return end(&mut server).await.map(|()| EXIT_INTERRUPTED),
        measured = measure(&args, globals, &server, &runtimes, &mut report) => measured,
    };
    // Ctrl-C also reaches what is being measured, which then fails before we know why.
    if measured.is_err() && tokio::time::timeout(SIGNAL_WAIT, stop).await.is_ok() {
        return end(&mut server).await.map(|()| EXIT_INTERRUPTED);
    }
    let ended = end(&mut server).await;
    // What was measured is worth telling, whatever came after.
    tell(&args, &report)?;
    measured.and(ended).map(|()| 0)
}

/// Removes every session. Interrupted again, we leave the rest to their idle timeout.
async fn end(server: &mut Server) -> Result<(), Failure> {
    output::progress("");
    tokio::select! {
        removed = server.destroy_all() => removed,
        () = interrupted() => Ok(()),
    }
}

/// Fills in the report, part by part.
async fn measure(
    args: &BenchArgs,
    globals: &Globals,
    server: &Server,
    runtimes: &[RuntimeKind],
    report: &mut Report,
) -> Result<(), Failure> {
    let (rounds, notes) = (args.iterations, &mut report.notes);
    if args.wants(Part::Latency) {
        for runtime in runtimes {
            output::progress("trying the programs of this machine");
            let programs = Programs::find(Host::beside(*runtime), notes)?;
            report.machine.add_tools(programs.usable());
            let measured = latency::measure(&programs, server, *runtime, rounds, notes).await?;
            match &mut report.latency {
                Some(latency) => latency.add(measured),
                None => report.latency = Some(measured),
            }
        }
    }
    if args.wants(Part::Throughput) {
        let programs = Arc::new(Programs::find(&[Host::Crun], notes)?);
        report.machine.add_tools(programs.usable());
        let load = Load {
            clients: args.clients,
            time: Duration::from_secs(args.seconds),
        };
        let measured = throughput::measure(&programs, server, globals, runtimes, load).await?;
        report.throughput = Some(measured);
    }
    if args.wants(Part::Density) {
        let plans: Vec<Plan> = runtimes.iter().map(|runtime| args.plan(*runtime)).collect();
        let data_dir = DataDir::of_server(globals);
        let measured = density::measure(server, &data_dir, &plans, rounds, notes).await?;
        report.density = Some(measured);
    }
    Ok(())
}

fn tell(args: &BenchArgs, report: &Report) -> Result<(), Failure> {
    if report.is_empty() {
        return Ok(());
    }
    if let (Some(path), Some(latency)) = (&args.svg, &report.latency) {
        let machine = report.machine.text();
        let chart = svg::chart(latency, machine.lines().next().unwrap_or_default());
        let failed = |e| Failure::io(&format!("write {}", path.display()), &e);
        std::fs::write(path, chart).map_err(failed)?;
    }
    match args.json {
        true => output::json(report),
        false => output::text(report.table().as_bytes()),
    }
}

// === impl BenchArgs ===

impl BenchArgs {
    fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }

    fn plan(&self, runtime: RuntimeKind) -> Plan {
        let (asked, default): (&[u32], &[u32]) = match runtime {
            RuntimeKind::Native => (&self.live, &LIVE_NATIVE),
            RuntimeKind::Gvisor => (&self.live_gvisor, &LIVE_OTHER),
            RuntimeKind::Firecracker | RuntimeKind::Kata => (&[], &LIVE_OTHER),
        };
        let mut counts = if asked.is_empty() { default } else { asked }.to_vec();
        // One crowd that grows.
        counts.sort_unstable();
        counts.dedup();
        Plan { runtime, counts }
    }
}

/// Those that were asked for, or all that work.
fn runtimes(asked: &[RuntimeKind], status: &v1::Status) -> Result<Vec<RuntimeKind>, Failure> {
    let usable = status.runtimes.iter().filter(|runtime| runtime.usable);
    let mut usable: Vec<RuntimeKind> = usable.filter_map(|it| it.name.parse().ok()).collect();
    for kind in asked {
        if !usable.contains(kind) {
            let said = status.runtimes.iter().find(|it| it.name == kind.as_str());
            let reason = said.map(|it| it.reason.clone()).unwrap_or_default();
            return Err(Failure::request(
                format!(
                    "the server has no runtime {kind}: `k8e sandbox status` says what each one lacks"
                ),
                reason,
            ));
        }
    }
    usable.retain(|kind| asked.is_empty() || asked.contains(kind));
    // The one with fewer layers first, as in the report.
    usable.sort_unstable();
    Ok(usable)
}

fn runtime(text: &str) -> Result<RuntimeKind, k8e_model::Error> {
    text.parse()
}

/// Somebody wants us to end.
async fn interrupted() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Whole {
        #[command(flatten)]
        args: BenchArgs,
    }

    fn args(line: &str) -> BenchArgs {
        let line = std::iter::once("bench").chain(line.split_whitespace());
        Whole::try_parse_from(line).unwrap().args
    }

    #[test]
    fn parts_and_counts_are_chosen() {
        let all = args("");
        assert!(all.wants(Part::Latency) && all.wants(Part::Density));
        assert_eq!(all.plan(RuntimeKind::Native).counts, LIVE_NATIVE);
        assert_eq!(all.plan(RuntimeKind::Gvisor).counts, LIVE_OTHER);
        let some = args("--only latency --only density --live 500,1,10,10 --live-gvisor 3");
        assert!(some.wants(Part::Density) && !some.wants(Part::Throughput));
        assert_eq!(some.plan(RuntimeKind::Native).counts, [1, 10, 500]);
        assert_eq!(some.plan(RuntimeKind::Gvisor).counts, [3]);
    }

    #[test]
    fn a_runtime_that_does_not_work_is_not_measured() {
        let runtime = |name: &str, usable| v1::Runtime {
            name: name.to_owned(),
            usable,
            reason: "runsc is not installed".to_owned(),
        };
        let status = v1::Status {
            runtimes: vec![runtime("gvisor", false), runtime("native", true)],
            ..Default::default()
        };
        assert_eq!(runtimes(&[], &status).unwrap(), [RuntimeKind::Native]);
        let Failure::Told { detail, .. } = runtimes(&[RuntimeKind::Gvisor], &status).unwrap_err()
        else {
            panic!("it is told");
        };
        assert_eq!(detail, "runsc is not installed");
    }
}
