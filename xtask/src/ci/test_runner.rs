//! Runs the test binaries of the workspace, two at a time.
//!
//! `cargo test` runs one binary after the other, and most of ours wait for other processes for a
//! third of their time. So cargo builds them, and we run them: in the order of [`LONGEST`], each in
//! the directory of its package as cargo would. The output of one binary is printed in one piece
//! when it has ended; until then it is in `target/test-output`. The end names every test that failed.

use crate::{Outcome, binaries, process};
use serde_json::Value;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How many binaries run at once. Each runs as many tests at once as there are cores.
const BINARIES_AT_ONCE: usize = 2;

/// A binary that takes longer hangs: it is killed, and what it printed tells where.
const BINARY_TIME_MAX: Duration = Duration::from_secs(35 * 60);

/// How often a running binary is looked at.
const POLL_EVERY: Duration = Duration::from_millis(50);

/// Binaries that take minutes, longest first: started late, one of them would run alone at the end.
const LONGEST: &[&str] = &["e2e", "stress", "cluster", "sdk", "deploy", "conformance"];

/// Where the output of each binary is while it runs, and afterwards; below cargo's target directory.
const OUTPUT_DIR: &str = "test-output";

/// One test binary that cargo built.
#[derive(Debug, PartialEq, Eq)]
struct Binary {
    package_dir: PathBuf,
    /// Its package and target, e.g. `crates/engine engine (test)`.
    name: String,
    target: String,
    program: PathBuf,
}

/// How a binary ended.
struct Ended {
    name: String,
    took: Duration,
    failure: Option<String>,
    failed_tests: Vec<String>,
}

/// Builds with `command`, a `cargo test` without its `--no-run`, and runs what was built with
/// `args`. The environment of `command` is that of the tests too.
pub(super) fn run(command: &mut Command, args: &[&str]) -> Outcome {
    let output_dir = &binaries::target_dir()?.join(OUTPUT_DIR);
    command.args(["--no-run", "--message-format=json-render-diagnostics"]);
    let mut binaries = built(&process::output(command)?)?;
    let rank = |binary: &Binary| LONGEST.iter().position(|name| *name == binary.target);
    binaries.sort_by_key(|binary| (rank(binary).unwrap_or(LONGEST.len()), binary.name.clone()));
    std::fs::create_dir_all(output_dir).map_err(|e| format!("{}: {e}", output_dir.display()))?;

    let environment: Vec<_> = command
        .get_envs()
        .map(|(name, value)| (name.to_owned(), value.map(ToOwned::to_owned)))
        .collect();
    let start = |binary: &Binary, output: &File| {
        let mut test = Command::new(&binary.program);
        for (name, value) in &environment {
            match value {
                Some(value) => test.env(name, value),
                None => test.env_remove(name),
            };
        }
        test.args(args)
            .current_dir(&binary.package_dir)
            .env("CARGO_MANIFEST_DIR", &binary.package_dir)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output.try_clone()?)
            .spawn()
    };
    let queue = Mutex::new(VecDeque::from(binaries));
    let ended = Mutex::new(Vec::new());
    // A function, so that the lock is free again while a binary runs.
    let next = || locked(&queue).pop_front();
    std::thread::scope(|scope| {
        for _ in 0..BINARIES_AT_ONCE {
            scope.spawn(|| {
                while let Some(binary) = next() {
                    eprintln!("    running {}", binary.name);
                    let (one, output) = run_one(&binary, output_dir, start);
                    // Held while it is printed: the output of one binary stays in one piece.
                    let mut ended = locked(&ended);
                    println!(
                        "\n    {} ({:.1} s)\n{output}",
                        one.name,
                        one.took.as_secs_f64()
                    );
                    ended.push(one);
                }
            });
        }
    });
    let ended = ended.into_inner().unwrap_or_else(PoisonError::into_inner);
    conclusion(&ended)
}

/// Nobody panics while holding one.
fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The test binaries among cargo's messages.
fn built(messages: &str) -> Result<Vec<Binary>, String> {
    let mut binaries = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line).map_err(|e| format!("cargo test: {e}"))?;
        let Some(program) = message["executable"].as_str() else {
            continue;
        };
        if message["profile"]["test"] != true {
            continue;
        }
        let manifest = Path::new(message["manifest_path"].as_str().unwrap_or_default());
        let package_dir = manifest.parent().unwrap_or(Path::new("."));
        let package = package_dir
            .file_name()
            .unwrap_or_default()
            .to_string_lossy();
        let target = message["target"]["name"].as_str().unwrap_or_default();
        let kind = message["target"]["kind"][0].as_str().unwrap_or_default();
        binaries.push(Binary {
            package_dir: package_dir.to_owned(),
            name: format!("{package} {target} ({kind})"),
            target: target.to_owned(),
            program: PathBuf::from(program),
        });
    }
    Ok(binaries)
}

/// Runs one to its end, and returns what it printed.
fn run_one(
    binary: &Binary,
    output_dir: &Path,
    start: impl Fn(&Binary, &File) -> io::Result<Child>,
) -> (Ended, String) {
    let started = Instant::now();
    let path = output_dir.join(binary.name.replace(['/', ' ', '(', ')'], "_") + ".txt");
    let run = || {
        let file = File::create(&path)?;
        wait(&mut start(binary, &file)?, started + BINARY_TIME_MAX)
    };
    let failure = match run() {
        Ok(status) if status.success() => None,
        Ok(status) => Some(describe(status)),
        Err(error) => Some(error.to_string()),
    };
    let output = std::fs::read(&path).unwrap_or_default();
    let output = String::from_utf8_lossy(&output).into_owned();
    let ended = Ended {
        name: binary.name.clone(),
        took: started.elapsed(),
        failure,
        failed_tests: failed_tests(&output),
    };
    (ended, output)
}

fn wait(child: &mut Child, deadline: Instant) -> io::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            let minutes = BINARY_TIME_MAX.as_secs() / 60;
            return Err(io::Error::other(format!("killed after {minutes} minutes")));
        }
        std::thread::sleep(POLL_EVERY);
    }
}

fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("killed by signal {signal}"),
        None => status.to_string(),
    }
}

/// The names below the last `failures:` of a binary's output.
fn failed_tests(output: &str) -> Vec<String> {
    let Some((_, list)) = output.rsplit_once("\nfailures:\n") else {
        return Vec::new();
    };
    let names = list.lines().skip_while(|line| line.trim().is_empty());
    names
        .map_while(|line| line.strip_prefix("    "))
        .map(|name| name.trim().to_owned())
        .collect()
}

/// One line for each binary, those that failed last, each followed by its tests that failed.
fn conclusion(ended: &[Ended]) -> Outcome {
    let mut ended: Vec<&Ended> = ended.iter().collect();
    ended.sort_by_key(|one| (one.failure.is_some(), std::cmp::Reverse(one.took)));
    eprintln!();
    let mut failed = Vec::new();
    for one in ended {
        let seconds = one.took.as_secs_f64();
        let how = one.failure.as_deref().unwrap_or("ok");
        eprintln!("{seconds:>8.1} s  {}: {how}", one.name);
        for test in &one.failed_tests {
            eprintln!("            {test}");
        }
        if one.failure.is_some() {
            failed.push(one.name.as_str());
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!("tests failed in {}", failed.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::{Binary, built, failed_tests, run_one};
    use std::path::PathBuf;
    use std::process::Command;

    #[test]
    fn only_test_binaries_are_run() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","manifest_path":"/r/crates/a/Cargo.toml","target":{"name":"a","kind":["lib"]},"profile":{"test":false},"executable":null}"#,
            "\n",
            r#"{"reason":"compiler-artifact","manifest_path":"/r/crates/a/Cargo.toml","target":{"name":"tool","kind":["bin"]},"profile":{"test":false},"executable":"/t/tool"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","manifest_path":"/r/crates/a/Cargo.toml","target":{"name":"engine","kind":["test"]},"profile":{"test":true},"executable":"/t/engine-12"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
            "\n"
        );
        assert_eq!(
            built(messages).unwrap(),
            [Binary {
                package_dir: PathBuf::from("/r/crates/a"),
                name: "a engine (test)".to_owned(),
                target: "engine".to_owned(),
                program: PathBuf::from("/t/engine-12"),
            }]
        );
        assert!(built("{not json").is_err());
    }

    #[test]
    fn the_tests_that_failed_are_named() {
        let output = "running 3 tests\ntest a ... ok\n\nfailures:\n\n---- b::c stdout ----\nno\n\n\n\
                      failures:\n    b::c\n    d\n\ntest result: FAILED. 1 passed; 2 failed\n";
        assert_eq!(failed_tests(output), ["b::c", "d"]);
        assert!(failed_tests("test result: ok. 3 passed\n").is_empty());
    }

    #[test]
    fn a_binary_that_fails_says_how() {
        let dir = tempfile::tempdir().unwrap();
        let binary = Binary {
            package_dir: dir.path().to_owned(),
            name: "a b (test)".to_owned(),
            target: "b".to_owned(),
            program: PathBuf::from("/bin/sh"),
        };
        let ended = |script: &str| {
            let (ended, output) = run_one(&binary, dir.path(), |binary, file| {
                let mut shell = Command::new(&binary.program);
                shell.args(["-c", script]).stdout(file.try_clone()?).spawn()
            });
            (ended.failure, output)
        };
        assert_eq!(ended("echo fine"), (None, "fine\n".to_owned()));
        assert_eq!(ended("exit 3").0.as_deref(), Some("exit status: 3"));
        assert_eq!(ended("kill -9 $$").0.as_deref(), Some("killed by signal 9"));
    }
}
