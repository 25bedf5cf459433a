//! Percentiles and ratios of what was measured, for eyes and for programs.

use super::subject::Subject;
use serde::Serialize;
use std::fmt::Write as _;
use std::time::Duration;

/// The measurements of one run.
pub(super) struct Report {
    series: Vec<(Subject, Vec<Duration>)>,
}

/// The report, for programs.
#[derive(Serialize)]
pub(super) struct ReportJson {
    subjects: Vec<SubjectJson>,
}

#[derive(Serialize)]
struct SubjectJson {
    name: &'static str,
    iterations: usize,
    p50_ms: f64,
    p95_ms: f64,
    p99_ms: f64,
    /// p50 over the p50 of fork+exec.
    ratio_fork_exec: Option<f64>,
    /// p50 over the p50 of bubblewrap; none when it is not installed.
    ratio_bubblewrap: Option<f64>,
}

// === impl Report ===

impl Report {
    pub(super) fn new(subjects: Vec<Subject>) -> Self {
        Self {
            series: subjects
                .into_iter()
                .map(|subject| (subject, Vec::new()))
                .collect(),
        }
    }

    pub(super) fn add(&mut self, subject: Subject, took: Duration) {
        let series = self.series.iter_mut().find(|(of, _)| *of == subject);
        series
            .expect("only subjects of the report are measured")
            .1
            .push(took);
    }

    pub(super) fn json(&self) -> ReportJson {
        let ratio = |p50: f64, to: Subject| {
            self.p50(to)
                .filter(|base| *base > 0.0)
                .map(|base| p50 / base)
        };
        let subjects = self.series.iter().map(|(subject, times)| {
            let p50_ms = percentile_ms(times, 50);
            SubjectJson {
                name: subject.name(),
                iterations: times.len(),
                p50_ms,
                p95_ms: percentile_ms(times, 95),
                p99_ms: percentile_ms(times, 99),
                ratio_fork_exec: ratio(p50_ms, Subject::ForkExec),
                ratio_bubblewrap: ratio(p50_ms, Subject::Bubblewrap),
            }
        });
        ReportJson {
            subjects: subjects.collect(),
        }
    }

    pub(super) fn table(&self) -> String {
        let mut table = String::new();
        let header = ("", "p50 ms", "p95 ms", "p99 ms", "×fork+exec", "×bwrap");
        let (name, p50, p95, p99, fork, bwrap) = header;
        let _ = writeln!(
            table,
            "{name:<32}{p50:>9}{p95:>9}{p99:>9}{fork:>12}{bwrap:>9}"
        );
        let shown =
            |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        for subject in self.json().subjects {
            let SubjectJson {
                name,
                p50_ms,
                p95_ms,
                p99_ms,
                ..
            } = subject;
            let (fork, bwrap) = (
                shown(subject.ratio_fork_exec),
                shown(subject.ratio_bubblewrap),
            );
            let _ = writeln!(
                table,
                "{name:<32}{p50_ms:>9.2}{p95_ms:>9.2}{p99_ms:>9.2}{fork:>12}{bwrap:>9}"
            );
        }
        table
    }

    fn p50(&self, subject: Subject) -> Option<f64> {
        let (_, times) = self.series.iter().find(|(of, _)| *of == subject)?;
        Some(percentile_ms(times, 50))
    }
}

/// The smallest measurement that `percent` of them do not exceed.
fn percentile_ms(times: &[Duration], percent: usize) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted
        .get(rank - 1)
        .map_or(0.0, |time| time.as_secs_f64() * 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_measurements() {
        let times: Vec<_> = (1..=100).rev().map(Duration::from_millis).collect();
        assert_eq!(percentile_ms(&times, 50), 50.0);
        assert_eq!(percentile_ms(&times, 99), 99.0);
        assert_eq!(percentile_ms(&times[..1], 50), 100.0);
        assert_eq!(percentile_ms(&[], 50), 0.0);
    }

    #[test]
    fn ratios_are_to_the_same_run() {
        let mut report = Report::new(vec![Subject::ForkExec, Subject::Exec]);
        report.add(Subject::ForkExec, Duration::from_millis(2));
        report.add(Subject::Exec, Duration::from_millis(5));
        let json = serde_json::to_value(report.json()).unwrap();
        assert_eq!(json["subjects"][1]["ratio_fork_exec"], 2.5);
        assert!(json["subjects"][1]["ratio_bubblewrap"].is_null());
        assert!(report.table().contains("2.50"));
    }
}
