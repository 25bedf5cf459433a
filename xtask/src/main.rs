//! `cargo xtask <task>`: everything a contributor or CI does, in one place.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a build tool talks to its terminal")]

mod codegen;

use std::process::ExitCode;

/// What a task returns: a message for the person who ran it.
type Outcome = Result<(), String>;

const USAGE: &str = "usage: cargo xtask <task>

  codegen [--check]    generate crates/{api,wire}/src/gen from proto/
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["codegen"] => codegen::run(codegen::Mode::Write),
        ["codegen", "--check"] => codegen::run(codegen::Mode::Check),
        _ => Err(USAGE.to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
