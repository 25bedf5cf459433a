//! All that one run found out, for programs and for eyes.

use super::bar::{Ratio, Verdict};
use super::density;
use super::latency::Latency;
use super::machine::Machine;
use super::throughput::Throughput;
use serde::Serialize;
use std::fmt::Write as _;

/// All that one run found out. A part that was not asked for is none.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    pub(super) latency: Option<Latency>,
    pub(super) throughput: Option<Throughput>,
    pub(super) density: Option<Vec<density::Row>>,
    /// What was left out, and why.
    pub(super) notes: Vec<String>,
}

// === impl Report ===

impl Report {
    /// Nothing is measured yet.
    pub(super) fn new(machine: Machine) -> Self {
        Self {
            machine,
            latency: None,
            throughput: None,
            density: None,
            notes: Vec::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.latency.is_none() && self.throughput.is_none() && self.density.is_none()
    }

    pub(super) fn table(&self) -> String {
        let mut table = self.machine.text();
        if let Some(latency) = &self.latency {
            table.push_str(&latency_table(latency));
        }
        if let Some(throughput) = &self.throughput {
            table.push_str(&throughput_table(throughput));
        }
        if let Some(density) = &self.density {
            table.push_str(&density_table(density));
        }
        let (met, missed) = self.bars();
        let _ = writeln!(table, "\nbars: {met} met, {missed} missed");
        for note in &self.notes {
            let _ = writeln!(table, "note: {note}");
        }
        table
    }

    /// How many bars were met, and how many missed.
    fn bars(&self) -> (usize, usize) {
        let verdicts = self.verdicts();
        let count = |met| verdicts.iter().filter(|v| v.met() == Some(met)).count();
        (count(true), count(false))
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let mut all = Vec::new();
        let of = |ratio: &Ratio| ratio.verdict;
        if let Some(latency) = &self.latency {
            let rows = latency.subjects.iter();
            all.extend(rows.flat_map(|row| row.ratios.iter().map(of)));
            all.extend(latency.pools.iter().map(|pool| pool.verdict));
        }
        if let Some(throughput) = &self.throughput {
            all.extend(
                throughput
                    .rows
                    .iter()
                    .filter_map(|row| row.ratio.as_ref())
                    .map(of),
            );
        }
        for row in self.density.iter().flatten() {
            all.extend(row.memory.as_ref().map(|memory| memory.verdict));
            all.extend(row.server.as_ref().map(|server| server.verdict));
            all.extend(row.claim.as_ref().map(of));
        }
        all
    }
}

fn latency_table(latency: &Latency) -> String {
    let title = format!("latency, {} rounds", latency.rounds);
    let mut table = format!(
        "\n{title:<33}{:>9}{:>9}{:>9}  p50 as a ratio\n",
        "p50 ms", "p95 ms", "p99 ms"
    );
    for row in &latency.subjects {
        let ratios: Vec<String> = row.ratios.iter().map(Ratio::text).collect();
        let line = format!(
            "{:<8}{:<25}{:>9.2}{:>9.2}{:>9.2}  {}",
            row.group,
            row.name,
            row.p50_ms,
            row.p95_ms,
            row.p99_ms,
            ratios.join("; ")
        );
        let _ = writeln!(table, "{}", line.trim_end());
    }
    for pool in &latency.pools {
        let rate = pool.hit_rate.unwrap_or(0.0) * 100.0;
        let (hits, all) = (pool.hits, pool.hits + pool.misses);
        let mark = match pool.verdict.met() {
            Some(true) => ", = 100 % ok",
            Some(false) => ", = 100 % MISSED",
            None => "",
        };
        let _ = writeln!(
            table,
            "{:<8}{hits} of {all} sessions got a warm sandbox: {rate:.1} %{mark}",
            pool.runtime
        );
    }
    table
}

fn throughput_table(throughput: &Throughput) -> String {
    let title = format!("throughput, {} clients", throughput.clients);
    let mut table = format!("\n{title:<33}{:>9}{:>9}\n", "per s", "done");
    for row in &throughput.rows {
        let ratio = row.ratio.as_ref().map(Ratio::text).unwrap_or_default();
        let line = format!(
            "{:<8}{:<25}{:>9.1}{:>9}  {ratio}",
            row.group, row.name, row.per_s, row.done
        );
        let _ = writeln!(table, "{}", line.trim_end());
    }
    table
}

fn density_table(rows: &[density::Row]) -> String {
    let mut table = format!(
        "\n{:<16}{:>9}{:>9}{:>9}{:>11}{:>14}\n",
        "density, live", "MB each", "PSS", "kernel", "server MB", "claim p50 ms"
    );
    for row in rows {
        let figure = |mb: Option<f64>| mb.map_or("-".to_owned(), |mb| format!("{mb:.2}"));
        let (memory, server) = (row.memory.as_ref(), row.server.as_ref());
        let mut marks: Vec<String> = Vec::new();
        let mut mark = |what: &str, verdict: Option<Verdict>| {
            let mark = verdict.map(|verdict| verdict.mark()).unwrap_or_default();
            if !mark.is_empty() {
                marks.push(format!("{what} {mark}"));
            }
        };
        mark("MB each", memory.map(|memory| memory.verdict));
        mark("server MB", server.map(|server| server.verdict));
        if let Some(claim) = &row.claim {
            marks.push(format!("claim {}", claim.text()));
        }
        let line = format!(
            "{:<8}{:>8}{:>9}{:>9}{:>9}{:>11}{:>14.2}  {}",
            row.runtime.as_str(),
            row.live,
            figure(memory.map(|memory| memory.each_mb)),
            figure(memory.map(|memory| memory.pss_mb)),
            figure(memory.and_then(|memory| memory.kernel_mb)),
            figure(server.map(|server| server.rss_mb)),
            row.claim_p50_ms,
            marks.join("; ")
        );
        let _ = writeln!(table, "{}", line.trim_end());
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::bar::Bar;
    use super::super::latency::{PoolUse, Row};
    use super::*;
    use k8e_model::RuntimeKind;

    fn report() -> Report {
        let bar = |figure, bar| Ratio::new("p50", figure, "fork+exec", Some(1.0), Some(bar));
        let row = Row {
            group: "native",
            name: "create, warm",
            measured: 5,
            p50_ms: 0.5,
            p95_ms: 0.6,
            p99_ms: 0.7,
            ratios: vec![bar(0.5, Bar::AtMost(1.0)), bar(3.0, Bar::AtMost(2.0))],
        };
        let pool = PoolUse {
            runtime: "native".to_owned(),
            hits: 3,
            misses: 1,
            hit_rate: Some(0.75),
            verdict: Verdict::new(Some(0.75), Some(Bar::AtLeast(1.0))),
        };
        let live = density::Row {
            runtime: RuntimeKind::Native,
            live: 500,
            memory: Some(density::Memory {
                sandboxes: 502,
                pss_mb: 0.5,
                kernel_mb: None,
                each_mb: 0.5,
                verdict: Verdict::new(Some(0.5), Some(Bar::AtMost(4.0))),
            }),
            server: None,
            claims: 30,
            claim_p50_ms: 1.0,
            claim: None,
        };
        Report {
            machine: Machine::describe("1"),
            latency: Some(Latency {
                rounds: 5,
                subjects: vec![row],
                pools: vec![pool],
            }),
            throughput: None,
            density: Some(vec![live]),
            notes: vec!["podman is not here".to_owned()],
        }
    }

    #[test]
    fn a_table_tells_every_bar() {
        let table = report().table();
        for part in [
            "native  create, warm                  0.50     0.60     0.70  0.50 × fork+exec, ≤ 1.00 ok; 3.00 × fork+exec, ≤ 2.00 MISSED\n",
            "native  3 of 4 sessions got a warm sandbox: 75.0 %, = 100 % MISSED\n",
            "native       500     0.50     0.50        -          -          1.00  MB each ≤ 4.00 ok\n",
            "bars: 2 met, 2 missed\n",
            "note: podman is not here\n",
        ] {
            assert!(table.contains(part), "{part:?} is not in\n{table}");
        }
        assert!(!table.contains("throughput"), "{table}");
    }

    #[test]
    fn json_has_what_the_table_has() {
        let json = serde_json::to_value(report()).unwrap();
        let ratio = &json["latency"]["subjects"][0]["ratios"][1];
        assert_eq!((&ratio["ratio"], &ratio["bar"]), (&3.0.into(), &2.0.into()));
        assert_eq!(ratio["met"], false);
        assert_eq!(json["latency"]["pools"][0]["hit_rate"], 0.75);
        assert_eq!(json["density"][0]["memory"]["met"], true);
        assert!(json["throughput"].is_null());
    }
}
