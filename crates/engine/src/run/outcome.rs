//! Outcome of a run: the guest's report, validated against what the host observed.

use k8e_model::{Flow, LimitEvents, LimitKind, Outcome, RunStatus};
use k8e_wire::proto::Exited;
use std::time::Duration;

const SIGKILL: i32 = 9;
const SIGNAL_MAX: i32 = 64;

/// What the host observed of a run.
pub(super) struct Seen {
    pub(super) elapsed: Duration,
    pub(super) stdout_bytes: u64,
    pub(super) stderr_bytes: u64,
    pub(super) limits_before: LimitEvents,
    pub(super) limits_after: LimitEvents,
    pub(super) egress_denied: Vec<Flow>,
}

/// The outcome, or the reason why the guest's report is impossible.
pub(super) fn judge(exited: &Exited, seen: Seen) -> Result<Outcome, &'static str> {
    if !(0..=255).contains(&exited.exit_code) || !(0..=SIGNAL_MAX).contains(&exited.signal) {
        return Err("it reported an impossible exit code");
    }
    let mut limits_hit = seen.limits_after.since(&seen.limits_before);
    // Where the sandbox's own kernel (gVisor) enforces the pids limit, the host cannot count and trusts the guest.
    if exited.pids_limit_reached && !limits_hit.contains(&LimitKind::Pids) {
        limits_hit.push(LimitKind::Pids);
    }
    // A shell whose last command was killed exits with 128 + SIGKILL.
    let killed = exited.signal == SIGKILL || exited.exit_code == 128 + SIGKILL;
    let status = if exited.timed_out {
        RunStatus::TimedOut
    } else if killed && limits_hit.contains(&LimitKind::Memory) {
        RunStatus::OomKilled
    } else {
        RunStatus::Completed
    };
    // The command cannot have written less than arrived; what did not arrive was truncated.
    let stdout_bytes = exited.stdout_bytes.max(seen.stdout_bytes);
    let stderr_bytes = exited.stderr_bytes.max(seen.stderr_bytes);
    Ok(Outcome {
        exit_code: exited.exit_code,
        signal: exited.signal,
        status,
        duration: Duration::from_micros(exited.duration_us).min(seen.elapsed),
        stdout_bytes,
        stderr_bytes,
        stdout_truncated: exited.stdout_truncated || stdout_bytes > seen.stdout_bytes,
        stderr_truncated: exited.stderr_truncated || stderr_bytes > seen.stderr_bytes,
        limits_hit,
        egress_denied: seen.egress_denied,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(oom_kills: u64, pids_refused: u64) -> Seen {
        Seen {
            elapsed: Duration::from_secs(1),
            stdout_bytes: 10,
            stderr_bytes: 0,
            limits_before: LimitEvents::default(),
            limits_after: LimitEvents {
                oom_kills,
                pids_refused,
            },
            egress_denied: Vec::new(),
        }
    }

    #[track_caller]
    fn check(exited: Exited, seen: Seen, status: RunStatus, limits_hit: &[LimitKind]) {
        let outcome = judge(&exited, seen).unwrap();
        assert_eq!(
            (outcome.status, outcome.limits_hit.as_slice()),
            (status, limits_hit)
        );
    }

    #[test]
    fn status_is_completed_timed_out_or_oom_killed() {
        let exit = |exit_code, signal| Exited {
            exit_code,
            signal,
            ..Exited::default()
        };
        check(exit(3, 0), seen(0, 0), RunStatus::Completed, &[]);
        check(exit(137, 9), seen(0, 0), RunStatus::Completed, &[]);
        check(
            exit(137, 9),
            seen(1, 0),
            RunStatus::OomKilled,
            &[LimitKind::Memory],
        );
        check(
            exit(137, 0),
            seen(1, 0),
            RunStatus::OomKilled,
            &[LimitKind::Memory],
        );
        check(
            exit(0, 0),
            seen(1, 0),
            RunStatus::Completed,
            &[LimitKind::Memory],
        );
        check(
            exit(1, 0),
            seen(0, 7),
            RunStatus::Completed,
            &[LimitKind::Pids],
        );
        let at_limit = |exit_code| Exited {
            pids_limit_reached: true,
            ..exit(exit_code, 0)
        };
        check(
            at_limit(1),
            seen(0, 0),
            RunStatus::Completed,
            &[LimitKind::Pids],
        );
        check(
            at_limit(0),
            seen(0, 2),
            RunStatus::Completed,
            &[LimitKind::Pids],
        );
        check(
            Exited {
                timed_out: true,
                ..exit(137, 9)
            },
            seen(0, 0),
            RunStatus::TimedOut,
            &[],
        );
    }

    #[test]
    fn impossible_reports_are_refused_or_corrected() {
        for (exit_code, signal) in [(-1, 0), (256, 0), (0, 65), (0, -9), (i32::MAX, i32::MIN)] {
            assert!(
                judge(
                    &Exited {
                        exit_code,
                        signal,
                        ..Exited::default()
                    },
                    seen(0, 0)
                )
                .is_err()
            );
        }
        let lies = Exited {
            duration_us: u64::MAX,
            stderr_bytes: 5,
            ..Exited::default()
        };
        let outcome = judge(&lies, seen(0, 0)).unwrap();
        assert_eq!(outcome.duration, Duration::from_secs(1));
        assert_eq!(
            (outcome.stdout_bytes, outcome.stdout_truncated),
            (10, false)
        );
        assert_eq!((outcome.stderr_bytes, outcome.stderr_truncated), (5, true));
    }
}
