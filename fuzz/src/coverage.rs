//! Coverage-guided fuzzing: runs targets in libFuzzer, with instrumented code.
//!
//! libFuzzer exits with its process, so each target has one (`libfuzzer.rs`). It starts with the
//! checked-in samples and the corpus of earlier runs, and extends the latter. Crashes are saved beside
//! those of the [mutating runner](crate::run), and are replayed in the same way.

use crate::{Target, corpus};
use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Environment variable with the name of the target, for the process that runs it.
pub const TARGET_VARIABLE: &str = "K8E_FUZZ_TARGET";

/// Timeout of one input, in seconds. Inputs take less than a millisecond, but instrumented code on a
/// busy machine is slow.
const INPUT_SECONDS_MAX: u64 = 20;

/// Memory limit of the whole process: corpus and tables of libFuzzer. Inputs have their own limit.
const PROCESS_MIB_MAX: u64 = 2048;

/// Last part of libFuzzer's output that is shown for a crash: panic, stack and path of the input.
const SAID_LINES_MAX: usize = 60;

/// Runs one target with the program of `libfuzzer.rs`; returns the coverage, or the crash.
pub fn run(program: &Path, target: &Target, seed: u64, time: Duration) -> Result<String, String> {
    let failed = |e: io::Error| format!("{}: run {}: {e}", target.name, program.display());
    let dir = corpus::found_dir();
    let found = dir.join("coverage").join(target.name);
    std::fs::create_dir_all(&found).map_err(failed)?;
    let words = dir.join("coverage").join(format!("{}.dict", target.name));
    std::fs::write(&words, dictionary(target.words)).map_err(failed)?;
    let log = dir.join("coverage").join(format!("{}.log", target.name));

    let mut command = Command::new(program);
    command
        .env(TARGET_VARIABLE, target.name)
        .arg(format!("-max_total_time={}", time.as_secs().max(1)))
        .arg(format!("-max_len={}", target.bytes_max))
        // 0 would mean a random seed.
        .arg(format!("-seed={}", (seed % u64::from(u32::MAX)).max(1)))
        .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
        .arg(format!("-rss_limit_mb={PROCESS_MIB_MAX}"))
        .arg("-use_value_profile=1")
        .arg(format!("-dict={}", words.display()))
        .arg(format!(
            "-artifact_prefix={}/{}-",
            dir.display(),
            target.name
        ))
        // New inputs are added to the first directory.
        .arg(&found)
        .arg(corpus::sample_dir(target));
    let said = File::create(&log).map_err(failed)?;
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(said);
    let status = command.status().map_err(failed)?;
    let said = std::fs::read(&log).map_err(failed)?;
    let said = String::from_utf8_lossy(&said);
    if status.success() {
        return Ok(summary(&said).unwrap_or_else(|| format!("see {}", log.display())));
    }
    let lines: Vec<&str> = said.lines().collect();
    let shown = &lines[lines.len().saturating_sub(SAID_LINES_MAX)..];
    Err(format!("{}: {status}:\n{}", target.name, shown.join("\n")))
}

/// Number of inputs and coverage, from libFuzzer's output.
fn summary(said: &str) -> Option<String> {
    let after = |word: &str| {
        let (_, rest) = said.rsplit_once(word)?;
        rest.split_whitespace().next()
    };
    let (executions, edges, features) = (after("Done ")?, after(" cov: ")?, after(" ft: ")?);
    Some(format!(
        "{executions} executions, {edges} edges and {features} features reached"
    ))
}

/// The dictionary of a target in libFuzzer's format: quoted, one per line.
fn dictionary(words: &[&str]) -> String {
    let mut text = String::new();
    for word in words.iter().filter(|word| !word.is_empty()) {
        let escaped: String = word.bytes().map(escape).collect();
        text.push_str(&format!("\"{escaped}\"\n"));
    }
    text
}

fn escape(byte: u8) -> String {
    match byte {
        b'"' | b'\\' => format!("\\{}", char::from(byte)),
        b' '..=b'~' => char::from(byte).to_string(),
        _ => format!("\\x{byte:02X}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_is_parsed_from_libfuzzers_output() {
        let said = "#12\tINITED cov: 7 ft: 8 corp: 1/1b\n\
                    #46109\tDONE   cov: 1234 ft: 5678 corp: 300/20Kb lim: 99 exec/s: 5123 rss: 70Mb\n\
                    Done 46109 runs in 9 second(s)\n";
        let told = "46109 executions, 1234 edges and 5678 features reached";
        assert_eq!(summary(said).as_deref(), Some(told));
        assert_eq!(summary("nothing"), None);
    }

    #[test]
    fn dictionary_words_are_escaped() {
        let words = ["GET ", "", "\"\\", "\0\n", "\u{202e}"];
        assert_eq!(
            dictionary(&words),
            "\"GET \"\n\"\\\"\\\\\"\n\"\\x00\\x0A\"\n\"\\xE2\\x80\\xAE\"\n"
        );
    }
}
