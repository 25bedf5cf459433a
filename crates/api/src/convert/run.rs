//! Runs: the command a request asks for, and how it ended.

use crate::v1;
use k8e_model::{Command, Error, Outcome, Program};
use std::time::Duration;

/// A month. Longer is a typo; `-1` is how to say "no limit".
const TIMEOUT_MS_MAX: i64 = 31 * 24 * 3600 * 1000;

/// The command of a run. `timeout` is what the server gives when the request does not say.
///
/// Takes what it uses out of `start` and leaves the rest, which says where to run.
pub fn command(start: &mut v1::RunStart, timeout: Duration) -> Result<Command, Error> {
    let program = match start.program.take() {
        Some(v1::run_start::Program::Argv(argv)) => {
            Program::Argv(argv.args.into_iter().map(Vec::from).collect())
        }
        Some(v1::run_start::Program::Code(code)) => Program::Code {
            language: code.language.parse()?,
            code: code.code.into(),
        },
        None => return Err(Error::invalid("nothing to run: give argv or code")),
    };
    let mut command = Command::new(program)?
        .in_dir(&start.cwd)?
        .as_user(&start.user)?;
    command.env = super::env(std::mem::take(&mut start.env))?;
    command.timeout = pick_timeout(start.timeout_ms, timeout)?;
    command.output_bytes_max = (start.output_bytes_max != 0).then_some(start.output_bytes_max);
    command.stdin = start.stdin;
    Ok(command)
}

/// How a run ended.
pub fn exited(outcome: Outcome) -> v1::RunExited {
    v1::RunExited {
        exit_code: outcome.exit_code,
        signal: outcome.signal,
        status: outcome.status.as_str().to_owned(),
        duration_us: u64::try_from(outcome.duration.as_micros()).unwrap_or(u64::MAX),
        stdout_bytes: outcome.stdout_bytes,
        stderr_bytes: outcome.stderr_bytes,
        stdout_truncated: outcome.stdout_truncated,
        stderr_truncated: outcome.stderr_truncated,
        limits_hit: outcome
            .limits_hit
            .iter()
            .map(|limit| limit.as_str().to_owned())
            .collect(),
        egress_denied: outcome
            .egress_denied
            .into_iter()
            .map(super::egress_flow)
            .collect(),
    }
}

fn pick_timeout(ms: i64, default: Duration) -> Result<Option<Duration>, Error> {
    match ms {
        0 => Ok(Some(default)),
        -1 => Ok(None),
        1..=TIMEOUT_MS_MAX => Ok(Some(Duration::from_millis(ms.unsigned_abs()))),
        _ => Err(Error::invalid(format!(
            "timeout of {ms} ms: use 1 to {TIMEOUT_MS_MAX}, or -1 for none"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8e_model::Language;

    const DEFAULT: Duration = Duration::from_secs(30);

    fn code(language: &str, code: &'static str) -> v1::RunStart {
        let code = v1::Code {
            language: language.into(),
            code: code.into(),
        };
        v1::RunStart {
            program: Some(v1::run_start::Program::Code(code)),
            ..Default::default()
        }
    }

    #[test]
    fn code_becomes_a_command() {
        let mut start = v1::RunStart {
            cwd: "/tmp".into(),
            env: [("A".to_owned(), "1".to_owned())].into(),
            output_bytes_max: 7,
            stdin: true,
            ..code("py", "print(1)")
        };
        let command = command(&mut start, DEFAULT).unwrap();
        let want = Program::Code {
            language: Language::Python,
            code: b"print(1)".to_vec(),
        };
        assert_eq!(command.program, want);
        assert_eq!(command.timeout, Some(DEFAULT));
        assert_eq!(command.output_bytes_max, Some(7));
        assert!(command.stdin);
    }

    #[test]
    fn arguments_stay_bytes() {
        let argv = v1::Argv {
            args: vec!["printf".into(), b"\xff"[..].into()],
        };
        let program = Some(v1::run_start::Program::Argv(argv));
        let mut start = v1::RunStart {
            program,
            timeout_ms: -1,
            ..Default::default()
        };
        let command = command(&mut start, DEFAULT).unwrap();
        assert_eq!(
            command.program,
            Program::Argv(vec![b"printf".to_vec(), b"\xff".to_vec()])
        );
        assert_eq!((command.timeout, command.output_bytes_max), (None, None));
    }

    #[test]
    fn bad_runs_are_refused() {
        let refused = |mut start: v1::RunStart| command(&mut start, DEFAULT).unwrap_err().message;
        assert!(refused(v1::RunStart::default()).contains("nothing to run"));
        assert!(refused(code("perl", "1")).contains("language"));
        assert!(refused(code("bash", " ")).contains("no code"));
        assert!(
            refused(v1::RunStart {
                timeout_ms: -2,
                ..code("", "x")
            })
            .contains("timeout")
        );
        assert!(
            refused(v1::RunStart {
                cwd: "x".into(),
                ..code("", "x")
            })
            .contains("absolute")
        );
    }
}
