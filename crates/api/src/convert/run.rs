//! Runs: the command and the session that a request asks for, and how the run ended.

use crate::v1;
use k8e_model::{Command, Error, Outcome, Program, RunRequest, RunTarget, TimeLimit};
use std::time::Duration;

/// A month. Longer is a typo; `-1` is how to say "no limit".
const TIMEOUT_MS_MAX: i64 = 31 * 24 * 3600 * 1000;

/// The request of a `Run`.
pub fn run_request(mut start: v1::RunStart) -> Result<RunRequest, Error> {
    let command = command(&mut start)?;
    let target = run_target(&start.session_id, start.fresh, start.create)?;
    Ok(RunRequest { target, command })
}

/// The session of a run, background run or terminal: the one that is named, a fresh one, or the one that such calls share.
pub fn run_target(
    session_id: &str,
    fresh: bool,
    create: Option<v1::CreateSessionRequest>,
) -> Result<RunTarget, Error> {
    if !session_id.is_empty() {
        if fresh {
            return Err(Error::invalid(
                "a fresh run creates a session: do not name one",
            ));
        }
        return super::session_id(session_id).map(RunTarget::Existing);
    }
    let spec = super::session_spec(create.unwrap_or_default())?;
    Ok(match fresh {
        true => RunTarget::Fresh(spec),
        false => RunTarget::Tenant(spec),
    })
}

/// The command of a run. Takes what it uses out of `start`; the rest is the session.
pub(super) fn command(start: &mut v1::RunStart) -> Result<Command, Error> {
    let program = match start.program.take() {
        Some(v1::run_start::Program::Argv(argv)) => Program::Argv(argv.args),
        Some(v1::run_start::Program::Code(code)) => Program::Code {
            language: code.language.parse()?,
            code: code.code,
        },
        None => return Err(Error::invalid("nothing to run: give argv or code")),
    };
    let mut command = Command::new(program)?
        .in_dir(&start.cwd)?
        .as_user(&start.user)?;
    command.env = super::env(std::mem::take(&mut start.env))?;
    command.timeout = time_limit(start.timeout_ms)?;
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

fn time_limit(ms: i64) -> Result<TimeLimit, Error> {
    match ms {
        0 => Ok(TimeLimit::Default),
        -1 => Ok(TimeLimit::Never),
        1..=TIMEOUT_MS_MAX => Ok(TimeLimit::After(Duration::from_millis(ms.unsigned_abs()))),
        _ => Err(Error::invalid(format!(
            "timeout of {ms} ms: use 1 to {TIMEOUT_MS_MAX}, or -1 for none"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8e_model::Language;

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
        let command = command(&mut start).unwrap();
        let want = Program::Code {
            language: Language::Python,
            code: "print(1)".into(),
        };
        assert_eq!(command.program, want);
        assert_eq!(command.timeout, TimeLimit::Default);
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
        let command = command(&mut start).unwrap();
        assert_eq!(
            command.program,
            Program::Argv(vec!["printf".into(), b"\xff"[..].into()])
        );
        assert_eq!(
            (command.timeout, command.output_bytes_max),
            (TimeLimit::Never, None)
        );
    }

    #[test]
    fn a_run_names_its_session_or_shares_one() {
        let request = |session_id: &str, fresh| {
            let start = v1::RunStart {
                session_id: session_id.into(),
                fresh,
                ..code("", "x")
            };
            run_request(start).map(|request| request.target)
        };
        let named = RunTarget::Existing("mine".parse().unwrap());
        assert_eq!(request("mine", false).unwrap(), named);
        assert!(matches!(request("", false), Ok(RunTarget::Tenant(_))));
        assert!(matches!(request("", true), Ok(RunTarget::Fresh(_))));
        assert!(request("mine", true).is_err());
    }

    #[test]
    fn bad_runs_are_refused() {
        let refused = |mut start: v1::RunStart| command(&mut start).unwrap_err().message;
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
