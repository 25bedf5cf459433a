//! `cargo xtask fuzz`: runs all targets, or one, for some seconds each.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a tool talks to its terminal"
)]

use k8e_fuzz::targets::TARGETS;
use k8e_fuzz::{Target, corpus, coverage, run};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const USAGE: &str = "usage: cargo xtask fuzz [TARGET] [--coverage] [--seconds N] [--seed N] [--input FILE]

  feeds each target N seconds (10) with mutations of fuzz/corpus/TARGET, with --coverage by libFuzzer,
  which is guided by the code that an input reaches; --input feeds one file once";

/// Command line arguments.
#[derive(Default)]
struct Args {
    target: Option<String>,
    seconds: Option<u64>,
    seed: Option<u64>,
    input: Option<String>,
    /// Path of the libFuzzer program, set by xtask.
    coverage: Option<PathBuf>,
}

fn main() -> ExitCode {
    match parse().and_then(|args| work(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn parse() -> Result<Args, String> {
    let mut parsed = Args::default();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(USAGE);
        let number = |text: String| text.parse::<u64>().map_err(|_| USAGE.to_owned());
        match arg.as_str() {
            "--seconds" => parsed.seconds = Some(number(value()?)?),
            "--seed" => parsed.seed = Some(number(value()?)?),
            "--input" => parsed.input = Some(value()?),
            "--coverage" => parsed.coverage = Some(value()?.into()),
            name if !name.starts_with('-') && parsed.target.is_none() => parsed.target = Some(arg),
            _ => return Err(USAGE.to_owned()),
        }
    }
    Ok(parsed)
}

fn work(args: &Args) -> Result<(), String> {
    let wanted = |target: &&Target| {
        args.target
            .as_deref()
            .is_none_or(|name| name == target.name)
    };
    let targets: Vec<&Target> = TARGETS.iter().filter(wanted).collect();
    if targets.is_empty() {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        return Err(format!("no such target; there are {}", names.join(", ")));
    }
    let time = Duration::from_secs(args.seconds.unwrap_or(10));
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seed = args.seed.unwrap_or(now.unwrap_or_default().as_secs());
    for target in targets {
        if let Some(path) = &args.input {
            let input = std::fs::read(path).map_err(|e| format!("{path}: {e}"))?;
            run::feed(target, &input)?;
            continue;
        }
        if let Some(program) = &args.coverage {
            let covered = coverage::run(program, target, seed, time)?;
            println!("{}: seed {seed}: {covered}, nothing broke", target.name);
            continue;
        }
        let report = run::run(target, seed, time).map_err(|crash| crash.to_string())?;
        println!(
            "{}: seed {seed}: {} executions, {} outcomes from {} samples, nothing broke",
            target.name,
            report.executions,
            report.outcomes,
            corpus::load(target).map_or(0, |samples| samples.len())
        );
    }
    Ok(())
}
