//! The mutating runner: runs one target for some time, with limits of time and memory per input.

use crate::mutate::{Random, mutate};
use crate::{Target, corpus, sys};
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Inputs kept because they had a new outcome, at most.
const POOL_MAX: usize = 4096;

/// Timeout of one input. They take less than a millisecond, but on a busy machine a thread may have to wait.
const INPUT_TIME_MAX: Duration = Duration::from_secs(20);

/// Statistics of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Number of inputs.
    pub executions: u64,
    /// Number of different outcomes.
    pub outcomes: usize,
}

/// An input that crashed a target.
#[derive(Debug)]
pub struct Crash {
    /// Name of the target.
    pub target: &'static str,
    /// Seed that reproduces the run.
    pub seed: u64,
    /// Path of the saved input.
    pub path: Option<PathBuf>,
    /// The panic message, or the limit that was exceeded.
    pub what: String,
}

/// The current input and the number of inputs so far, for the watchdog thread.
#[derive(Default)]
struct Watched {
    input: Mutex<Vec<u8>>,
    fed: AtomicU64,
    over: AtomicBool,
}

/// Runs the samples, then mutations of them, until the time is over.
pub fn run(target: &Target, seed: u64, time: Duration) -> Result<Report, Crash> {
    let begun = Instant::now();
    let crash = |what: String, input: &[u8]| Crash {
        target: target.name,
        seed,
        path: corpus::save_crash(target.name, input).ok(),
        what,
    };
    let mut pool = corpus::load(target).map_err(|e| crash(format!("no corpus: {e}"), &[]))?;
    let watched = Arc::new(Watched::default());
    let watching = watch(Arc::clone(&watched), target.name, seed);
    let mut random = Random::new(seed);
    let mut seen = HashSet::new();
    let samples = pool.len();
    let mut executions = 0;
    let ended = loop {
        let input = match pool.get(usize::try_from(executions).unwrap_or(usize::MAX)) {
            Some(sample) if executions < samples as u64 => sample.clone(),
            _ if begun.elapsed() >= time => break Ok(()),
            _ => mutate(&mut random, &pool, target.words, target.bytes_max),
        };
        watched.feed(&input);
        executions += 1;
        match feed(target, &input) {
            Ok(outcome) => {
                if seen.insert(outcome) && pool.len() < POOL_MAX {
                    pool.push(input);
                }
            }
            Err(what) => break Err(crash(what, &input)),
        }
    };
    watched.over.store(true, Ordering::Relaxed);
    watching.thread().unpark();
    let _ = watching.join();
    ended.map(|()| Report {
        executions,
        outcomes: seen.len(),
    })
}

/// Runs one input; returns its outcome, or the crash.
pub fn feed(target: &Target, input: &[u8]) -> Result<u64, String> {
    let before = sys::begin();
    let fed = catch_unwind(AssertUnwindSafe(|| (target.feed)(input)));
    let used = sys::peak().saturating_sub(before);
    let outcome = fed.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        text.unwrap_or("a panic").to_owned()
    })?;
    if used > target.memory_max {
        return Err(format!(
            "{} bytes took {used} bytes of memory, at most {} are expected",
            input.len(),
            target.memory_max
        ));
    }
    Ok(outcome)
}

// === impl Watched ===

impl Watched {
    fn feed(&self, input: &[u8]) {
        let mut held = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        held.clear();
        held.extend_from_slice(input);
        self.fed.fetch_add(1, Ordering::Relaxed);
    }
}

/// Watchdog: saves an input that exceeds the timeout, and ends the process.
#[expect(clippy::print_stderr, reason = "there is nobody else left to tell")]
fn watch(watched: Arc<Watched>, target: &'static str, seed: u64) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut last = (0, Instant::now());
        while !watched.over.load(Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_secs(1));
            let fed = watched.fed.load(Ordering::Relaxed);
            if fed != last.0 {
                last = (fed, Instant::now());
            } else if last.1.elapsed() > INPUT_TIME_MAX && !watched.over.load(Ordering::Relaxed) {
                let input = watched.input.lock().unwrap_or_else(PoisonError::into_inner);
                let path = corpus::save_crash(target, &input);
                eprintln!("{target}: seed {seed}: an input takes for ever: {path:?}");
                std::process::abort();
            }
        }
    })
}

// === impl Crash ===

impl std::fmt::Display for Crash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (target, seed, what) = (self.target, self.seed, &self.what);
        write!(f, "{target}: seed {seed}: {what}")?;
        match &self.path {
            Some(path) => write!(f, "; the input is {}", path.display()),
            None => Ok(()),
        }
    }
}
