//! Terminals (PTYs): command, size, input and grace period.

use crate::v1;
use k8e_model::{Command, Error, Program, TerminalId, TimeLimit};
use std::time::Duration;

/// Bytes of input in one call.
const WRITE_BYTES_MAX: usize = 1024 * 1024;

/// Longest grace period for a program to end, in milliseconds.
const GRACE_MS_MAX: i64 = 20_000;

/// Rows or columns of a terminal; the largest screens have some hundreds.
const SIZE_MAX: u32 = 10_000;

/// Default program of a terminal.
const SHELL: &[u8] = b"bash";

/// The command of a terminal and its size.
///
/// Takes what it uses out of `request` and leaves the rest, which names the session.
pub fn terminal_command(
    request: &mut v1::CreateTerminalRequest,
) -> Result<(Command, (u16, u16)), Error> {
    let mut argv = std::mem::take(&mut request.argv);
    if argv.is_empty() {
        argv.push(SHELL.into());
    }
    let mut command = Command::new(Program::Argv(argv))?
        .in_dir(&request.cwd)?
        .as_user(&request.user)?;
    command.env = super::env(std::mem::take(&mut request.env))?;
    command.timeout = TimeLimit::Never;
    let size = terminal_size(request.rows, request.cols)?;
    Ok((command, size))
}

/// A size; 0 is the default.
pub fn terminal_size(rows: u32, cols: u32) -> Result<(u16, u16), Error> {
    let number = |number: u32| {
        u16::try_from(number)
            .ok()
            .filter(|_| number <= SIZE_MAX)
            .ok_or_else(|| {
                Error::invalid(format!(
                    "a terminal of {rows} rows and {cols} columns: use up to {SIZE_MAX}"
                ))
            })
    };
    Ok((number(rows)?, number(cols)?))
}

/// The terminal that a call names.
pub fn terminal_id(text: &str) -> Result<TerminalId, Error> {
    if text.is_empty() {
        return Err(Error::invalid("terminal_id required"));
    }
    text.parse()
}

/// Checks the input of one call.
pub fn terminal_input(data: &[u8]) -> Result<(), Error> {
    if data.len() > WRITE_BYTES_MAX {
        return Err(Error::invalid(format!(
            "{} bytes to type, at most {WRITE_BYTES_MAX} at once are allowed",
            data.len()
        )));
    }
    Ok(())
}

/// The grace period of programs that were sent a signal to end; none is the server's default.
pub fn terminal_grace(ms: i64) -> Result<Option<Duration>, Error> {
    match ms {
        0 => Ok(None),
        -1 => Ok(Some(Duration::ZERO)),
        1..=GRACE_MS_MAX => Ok(Some(Duration::from_millis(ms.unsigned_abs()))),
        _ => Err(Error::invalid(format!(
            "a grace of {ms} ms: use 1 to {GRACE_MS_MAX}, or -1 for none"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_becomes_a_command() {
        let mut request = v1::CreateTerminalRequest {
            argv: vec!["python3".into(), "-q".into()],
            cwd: "/tmp".into(),
            rows: 50,
            ..Default::default()
        };
        let (command, size) = terminal_command(&mut request).unwrap();
        let want = Program::Argv(vec!["python3".into(), "-q".into()]);
        assert_eq!((command.program, command.timeout), (want, TimeLimit::Never));
        assert_eq!(size, (50, 0));
        let (shell, _) = terminal_command(&mut v1::CreateTerminalRequest::default()).unwrap();
        assert_eq!(shell.program, Program::Argv(vec!["bash".into()]));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(terminal_size(10_001, 1).is_err());
        assert!(terminal_size(1, 70_000).is_err());
        assert!(terminal_id("").is_err());
        assert!(terminal_id("term/../x").is_err());
        assert!(terminal_input(&[0; WRITE_BYTES_MAX]).is_ok());
        assert!(terminal_input(&[0; WRITE_BYTES_MAX + 1]).is_err());
        assert_eq!(terminal_grace(0).unwrap(), None);
        assert_eq!(terminal_grace(-1).unwrap(), Some(Duration::ZERO));
        assert!(terminal_grace(-2).is_err() && terminal_grace(20_001).is_err());
    }
}
