//! How a run ended: what the guest says, held against what the host saw.

use k8e_model::{Flow, LimitEvents, LimitKind, Outcome, RunStatus};
use k8e_wire::proto::Exited;
use std::time::Duration;

const SIGKILL: i32 = 9;
const SIGNAL_MAX: i32 = 64;

/// What the host saw of a run.
pub(super) struct Seen {
    pub(super) elapsed: Duration,
    pub(super) stdout_bytes: u64,
    pub(super) stderr_bytes: u64,
    pub(super) limits_before: LimitEvents,
    pub(super) limits_after: LimitEvents,
    pub(super) egress_denied: Vec<Flow>,
}

/// The outcome, or what cannot be.
pub(super) fn judge(exited: &Exited, seen: Seen) -> Result<Outcome, &'static str> {
    if !(0..=255).contains(&exited.exit_code) || !(0..=SIGNAL_MAX).contains(&exited.signal) {
        return Err("it reported an impossible exit code");
    }
    let limits_hit = seen.limits_after.since(&seen.limits_before);
    // A shell whose last command was killed exits by itself with the same number.
    let killed = exited.signal == SIGKILL || exited.exit_code == 128 + SIGKILL;
    let status = if exited.timed_out {
        RunStatus::TimedOut
    } else if killed && limits_hit.contains(&LimitKind::Memory) {
        RunStatus::OomKilled
    } else {
        RunStatus::Completed
    };
    // It cannot have written less than arrived, and what did not arrive was cut.
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
    fn the_status_is_told_apart() {
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
    fn what_cannot_be_is_refused_or_corrected() {
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
