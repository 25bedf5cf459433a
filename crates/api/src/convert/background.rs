//! Background runs: what starts one, and how it is shown.

use crate::v1;
use k8e_model::{BackgroundRun, Error, LimitKind, RunId, RunRequest};

/// The request of a `StartRun`.
pub fn background_request(start: v1::RunStart) -> Result<RunRequest, Error> {
    if start.stdin {
        return Err(Error::invalid(
            "a background run takes no standard input: write it to a file",
        ));
    }
    if start.fresh {
        return Err(Error::invalid(
            "a background run needs a session that stays: leave out fresh",
        ));
    }
    super::run_request(start)
}

/// The run that a call names.
pub fn run_id(text: &str) -> Result<RunId, Error> {
    if text.is_empty() {
        return Err(Error::invalid("run_id required"));
    }
    text.parse()
}

/// A background run, as a client sees it.
pub fn background_run(run: BackgroundRun) -> v1::BackgroundRun {
    v1::BackgroundRun {
        run_id: run.id.to_string(),
        session_id: run.session.to_string(),
        status: run.status.as_str().to_owned(),
        reason: run.reason,
        stdout: run.stdout.into(),
        stderr: run.stderr.into(),
        stdout_truncated: run.stdout_truncated,
        stderr_truncated: run.stderr_truncated,
        exit_code: run.exit_code,
        signal: run.signal,
        duration_us: u64::try_from(run.duration.as_micros()).unwrap_or(u64::MAX),
        program: run.program,
        started_at_unix_ms: run.started_at,
        ended_at_unix_ms: run.ended_at.unwrap_or(0),
        limits_hit: run
            .limits_hit
            .into_iter()
            .map(LimitKind::as_str)
            .map(str::to_owned)
            .collect(),
        session_created: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8e_model::{BackgroundStatus, SessionId, TimeLimit};
    use std::time::Duration;

    fn start() -> v1::RunStart {
        let argv = v1::Argv {
            args: vec!["true".into()],
        };
        v1::RunStart {
            program: Some(v1::run_start::Program::Argv(argv)),
            ..Default::default()
        }
    }

    #[test]
    fn a_background_run_has_its_own_rules() {
        let timeout = |timeout_ms| {
            let start = v1::RunStart {
                timeout_ms,
                ..start()
            };
            background_request(start).unwrap().command.timeout
        };
        assert_eq!(timeout(0), TimeLimit::Default);
        assert_eq!(timeout(-1), TimeLimit::Never);
        assert_eq!(timeout(5), TimeLimit::After(Duration::from_millis(5)));
        for wrong in [
            v1::RunStart {
                stdin: true,
                ..start()
            },
            v1::RunStart {
                fresh: true,
                ..start()
            },
        ] {
            assert!(background_request(wrong).is_err());
        }
        assert!(run_id("").unwrap_err().message.contains("run_id required"));
        assert!(run_id("../x").is_err());
    }

    #[test]
    fn a_run_keeps_what_it_says() {
        let session: SessionId = "s".parse().unwrap();
        let mut run = BackgroundRun::new(session, "sh".to_owned(), None, 7);
        run.status = BackgroundStatus::TimedOut;
        run.stdout = vec![0, 255];
        run.limits_hit = vec![LimitKind::Pids];
        run.ended_at = Some(9);
        let wire = background_run(run);
        assert_eq!((&*wire.status, &*wire.stdout), ("timed_out", &[0, 255][..]));
        assert_eq!((wire.started_at_unix_ms, wire.ended_at_unix_ms), (7, 9));
        assert_eq!(wire.limits_hit, ["pids"]);
    }
}
