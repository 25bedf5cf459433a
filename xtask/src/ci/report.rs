//! The steps of a CI run: what each took, what failed, what was not checked. The table of them is
//! the last thing that is printed, also when a step failed.

use crate::Outcome;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// The steps so far.
pub(super) struct Report {
    started: Instant,
    steps: Vec<Step>,
    not_checked: Vec<String>,
}

struct Step {
    name: &'static str,
    took: Duration,
    is_ok: bool,
}

// === impl Report ===

impl Report {
    /// Runs `steps`, and prints the table however they end.
    pub(super) fn of(steps: impl FnOnce(&mut Self) -> Outcome) -> Outcome {
        let mut report = Self {
            started: Instant::now(),
            steps: Vec::new(),
            not_checked: Vec::new(),
        };
        let outcome = steps(&mut report);
        eprintln!("\n{}", report.table(outcome.is_ok()));
        outcome
    }

    /// Runs one step, and says when it begins and how it ended.
    pub(super) fn step<T>(
        &mut self,
        name: &'static str,
        work: impl FnOnce() -> Result<T, String>,
    ) -> Result<T, String> {
        eprintln!("==> {name}");
        let started = Instant::now();
        let outcome = work();
        let (took, is_ok) = (started.elapsed(), outcome.is_ok());
        let word = if is_ok { "ok" } else { "FAILED" };
        eprintln!("<== {name}: {word} in {:.1} s", took.as_secs_f64());
        self.steps.push(Step { name, took, is_ok });
        outcome.map_err(|message| format!("stopped at `{name}`: {message}"))
    }

    /// Says now, and once more below the table, that something was not checked, and why.
    pub(super) fn not_checked(&mut self, what: String) {
        eprintln!("!!! NOT CHECKED: {what}");
        self.not_checked.push(what);
    }

    fn table(&self, is_green: bool) -> String {
        let mut table = String::new();
        for step in &self.steps {
            let failed = if step.is_ok { "" } else { "  FAILED" };
            let seconds = step.took.as_secs_f64();
            let _ = writeln!(table, "{seconds:>8.1} s  {}{failed}", step.name);
        }
        let all = if is_green {
            "all: green"
        } else {
            "all: FAILED"
        };
        let _ = write!(
            table,
            "{:>8.1} s  {all}",
            self.started.elapsed().as_secs_f64()
        );
        for what in &self.not_checked {
            let _ = write!(table, "\n!!! NOT CHECKED: {what}");
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::Report;

    #[test]
    fn the_table_has_every_step_and_names_the_one_that_failed() {
        let mut table = String::new();
        let outcome = Report::of(|report| {
            report.step("first", || Ok(()))?;
            report.not_checked("advisories: offline".to_owned());
            let second = report.step("second", || Err::<(), _>("it broke".to_owned()));
            table = report.table(second.is_ok());
            second
        });
        assert_eq!(outcome.unwrap_err(), "stopped at `second`: it broke");
        let lines: Vec<&str> = table.lines().map(str::trim).collect();
        assert_eq!(
            lines,
            [
                "0.0 s  first",
                "0.0 s  second  FAILED",
                "0.0 s  all: FAILED",
                "!!! NOT CHECKED: advisories: offline"
            ]
        );
    }
}
