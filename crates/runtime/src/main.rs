//! The `k8e-runtime` binary: parses flags, serves, and prints errors.

use k8e_runtime::{Config, Task};
use std::error::Error;
use std::io::{self, Write as _};
use std::process::ExitCode;

/// Exit code for an invalid command line, as of Go's `flag` package.
const BAD_USAGE: u8 = 2;

fn main() -> ExitCode {
    let args = std::env::args_os().skip(1);
    match Config::read(args, std::env::vars_os()) {
        Ok(Task::Serve(config)) => match k8e_runtime::run(*config) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(&error, ExitCode::FAILURE),
        },
        Ok(Task::Print(text)) => match io::stdout().write_all(text.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => failed(&error, ExitCode::from(BAD_USAGE)),
    }
}

fn failed(error: &dyn Error, code: ExitCode) -> ExitCode {
    let mut text = format!("k8e-runtime: {error}");
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    let _ = writeln!(io::stderr(), "{text}");
    code
}
