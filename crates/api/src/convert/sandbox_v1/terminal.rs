//! Terminals (PTYs): sizes, grace periods and names of signals.

use crate::sandbox_v1::{CreateTerminalRequest, TerminalSignal};
use crate::{convert, v1};
use k8e_model::{Command, Error};
use std::time::Duration;

/// Default grace period, as in the Go server.
const GRACE_DEFAULT: Duration = Duration::from_millis(50);

/// Longest grace period for a program to end, in milliseconds.
const GRACE_MS_MAX: u64 = 20_000;

/// Signals that end programs, as Linux numbers them on every machine that we run on.
const SIGNALS: [(i32, &str); 20] = [
    (1, "SIGHUP"),
    (2, "SIGINT"),
    (3, "SIGQUIT"),
    (4, "SIGILL"),
    (5, "SIGTRAP"),
    (6, "SIGABRT"),
    (7, "SIGBUS"),
    (8, "SIGFPE"),
    (9, "SIGKILL"),
    (10, "SIGUSR1"),
    (11, "SIGSEGV"),
    (12, "SIGUSR2"),
    (13, "SIGPIPE"),
    (14, "SIGALRM"),
    (15, "SIGTERM"),
    (16, "SIGSTKFLT"),
    (20, "SIGTSTP"),
    (24, "SIGXCPU"),
    (25, "SIGXFSZ"),
    (31, "SIGSYS"),
];

/// The command of a terminal and its size.
pub fn terminal_command(wire: CreateTerminalRequest) -> Result<(Command, (u16, u16)), Error> {
    if wire.argv.is_empty() {
        return Err(Error::invalid("argv must be non-empty"));
    }
    let mut ours = v1::CreateTerminalRequest {
        argv: wire.argv.into_iter().map(Into::into).collect(),
        cwd: wire.workdir,
        env: wire.env,
        rows: u32::try_from(wire.rows).unwrap_or(0),
        cols: u32::try_from(wire.cols).unwrap_or(0),
        ..Default::default()
    };
    convert::terminal_command(&mut ours)
}

/// A new size.
pub fn terminal_size(rows: i32, cols: i32) -> Result<(u16, u16), Error> {
    match (u32::try_from(rows), u32::try_from(cols)) {
        (Ok(rows @ 1..), Ok(cols @ 1..)) => convert::terminal_size(rows, cols),
        _ => Err(Error::invalid(format!(
            "a terminal of {rows} rows and {cols} columns: use at least 1"
        ))),
    }
}

/// The grace period of programs that were sent a signal to end.
pub fn terminal_grace(ms: i32) -> Result<Duration, Error> {
    match u64::try_from(ms) {
        Ok(0) => Ok(GRACE_DEFAULT),
        Ok(ms) => Ok(Duration::from_millis(ms.min(GRACE_MS_MAX))),
        Err(_) => Err(Error::invalid(format!("a grace of {ms} ms: use 0 or more"))),
    }
}

/// The number of a signal on Linux.
pub fn signal_number(signal: i32) -> Result<i32, Error> {
    match TerminalSignal::try_from(signal) {
        Ok(TerminalSignal::Int) => Ok(2),
        Ok(TerminalSignal::Term) => Ok(15),
        Ok(TerminalSignal::Kill) => Ok(9),
        Ok(TerminalSignal::Tstp) => Ok(20),
        Ok(TerminalSignal::Hup) => Ok(1),
        Ok(TerminalSignal::Unspecified) | Err(_) => Err(Error::invalid(format!(
            "unsupported terminal signal {signal}: use INT, TERM, KILL, TSTP or HUP"
        ))),
    }
}

/// The name of a signal, as in SIGTERM; empty for none.
pub fn signal_name(number: i32) -> String {
    let known = SIGNALS.iter().find(|(known, _)| *known == number);
    match (number, known) {
        (0, _) => String::new(),
        (_, Some((_, name))) => (*name).to_owned(),
        (number, None) => format!("SIG{number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8e_model::Program;

    #[test]
    fn a_request_becomes_a_command() {
        let wire = CreateTerminalRequest {
            argv: vec!["python3".into()],
            rows: -5,
            cols: 100,
            ..Default::default()
        };
        let (command, size) = terminal_command(wire).unwrap();
        assert_eq!(command.program, Program::Argv(vec!["python3".into()]));
        assert_eq!(size, (0, 100));
        let none = terminal_command(CreateTerminalRequest::default());
        assert_eq!(none.unwrap_err().message, "argv must be non-empty");
    }

    #[test]
    fn numbers_are_checked() {
        assert_eq!(terminal_size(24, 80).unwrap(), (24, 80));
        assert!(terminal_size(0, 80).is_err() && terminal_size(24, -1).is_err());
        assert_eq!(terminal_grace(0).unwrap(), GRACE_DEFAULT);
        let longest = Duration::from_millis(GRACE_MS_MAX);
        assert_eq!(terminal_grace(i32::MAX).unwrap(), longest);
        assert!(terminal_grace(-1).is_err());
    }

    #[test]
    fn signals_have_names_and_numbers() {
        for (signal, number, name) in [
            (TerminalSignal::Int, 2, "SIGINT"),
            (TerminalSignal::Term, 15, "SIGTERM"),
            (TerminalSignal::Kill, 9, "SIGKILL"),
            (TerminalSignal::Tstp, 20, "SIGTSTP"),
            (TerminalSignal::Hup, 1, "SIGHUP"),
        ] {
            assert_eq!(signal_number(signal.into()).unwrap(), number);
            assert_eq!(signal_name(number), name);
        }
        assert!(signal_number(0).is_err() && signal_number(77).is_err());
        assert_eq!(
            (signal_name(0), signal_name(40)),
            (String::new(), "SIG40".to_owned())
        );
    }
}
