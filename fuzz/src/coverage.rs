//! Runs targets in libFuzzer, which watches which code an input reaches and which values are compared.
//!
//! libFuzzer ends with its process, so each target has one (`libfuzzer.rs`). It begins with the
//! checked-in samples and what earlier runs found, and adds to the latter. What breaks something is
//! kept beside what the [mutating runner](crate::run) keeps, and is fed again in the same way.

use crate::{Target, corpus};
use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The environment variable that names the target to the process that runs it.
pub const TARGET_VARIABLE: &str = "K8E_FUZZ_TARGET";

/// Seconds that one input may take. Nothing here takes a millisecond; instrumented code on a busy
/// machine is slow.
const INPUT_SECONDS_MAX: u64 = 20;

/// Of the whole process: libFuzzer's corpus and tables. What a single input may take is counted apart.
const PROCESS_MIB_MAX: u64 = 2048;

/// Of what libFuzzer said, when something broke: the panic, the stack and where the input is.
const SAID_LINES_MAX: usize = 60;

/// Runs one target with the program of `libfuzzer.rs`; what was covered, or what broke.
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
        // 0 stands for a random one.
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
        // New inputs go to the first.
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

/// How many inputs were fed, and how much of the instrumented code they reached.
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

/// The words of a target as libFuzzer reads them: in quotes, one in a line.
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
    fn what_was_reached_is_read_from_what_libfuzzer_says() {
        let said = "#12\tINITED cov: 7 ft: 8 corp: 1/1b\n\
                    #46109\tDONE   cov: 1234 ft: 5678 corp: 300/20Kb lim: 99 exec/s: 5123 rss: 70Mb\n\
                    Done 46109 runs in 9 second(s)\n";
        let told = "46109 executions, 1234 edges and 5678 features reached";
        assert_eq!(summary(said).as_deref(), Some(told));
        assert_eq!(summary("nothing"), None);
    }

    #[test]
    fn words_are_escaped_as_libfuzzer_wants_them() {
        let words = ["GET ", "", "\"\\", "\0\n", "\u{202e}"];
        assert_eq!(
            dictionary(&words),
            "\"GET \"\n\"\\\"\\\\\"\n\"\\x00\\x0A\"\n\"\\xE2\\x80\\xAE\"\n"
        );
    }
}
