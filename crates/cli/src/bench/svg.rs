//! The latency table as a picture: one bar for each subject, on a logarithmic scale.
//!
//! Written by hand: a picture of rectangles needs no library. Colours follow whether the reader
//! has a light or a dark background.

use super::latency::{Latency, Row};
use std::fmt::Write as _;

const ROW_HEIGHT: f64 = 24.0;
const BAR_HEIGHT: f64 = 16.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 34.0;
/// Where bars begin, and how long the longest may be; what is left is for its figure.
const LEFT: f64 = 250.0;
const LENGTH: f64 = 400.0;
const WIDTH: f64 = 730.0;

/// The p50 of every subject.
pub(super) fn chart(latency: &Latency, machine: &str) -> String {
    let rows: Vec<&Row> = latency
        .subjects
        .iter()
        .filter(|row| row.p50_ms > 0.0)
        .collect();
    let scale = Scale::of(&rows);
    let mut y = TOP;
    let mut bars = String::new();
    for row in &rows {
        bars.push_str(&bar(row, y, &scale));
        y += ROW_HEIGHT;
    }
    let lines = grid(&scale, y);
    let height = y + BOTTOM;
    let machine = escape(machine);
    let end = height - 10.0;
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-label="Median times in milliseconds, on a logarithmic scale">
<style>
text {{ font: 12px system-ui, sans-serif; fill: #1f2328; }}
.name {{ text-anchor: end; }}
.axis {{ text-anchor: middle; font-size: 10px; fill: #656d76; }}
.small {{ font-size: 10px; fill: #656d76; }}
line {{ stroke: #d0d7de; }}
.host {{ fill: #8c959f; }}
.native {{ fill: #0969da; }}
.gvisor {{ fill: #1a7f37; }}
.other {{ fill: #8250df; }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3; }}
.axis, .small {{ fill: #9198a1; }}
line {{ stroke: #3d444d; }}
.native {{ fill: #4493f8; }}
.gvisor {{ fill: #3fb950; }}
.other {{ fill: #ab7df8; }}
}}
</style>
<text x="8" y="18" class="small">p50 of {} rounds, milliseconds, logarithmic</text>
{lines}{bars}<text x="8" y="{end}" class="small">{machine}</text>
</svg>
"##,
        latency.rounds
    )
}

/// From milliseconds to a length.
struct Scale {
    /// Powers of ten.
    from: i32,
    to: i32,
}

// === impl Scale ===

impl Scale {
    /// The whole powers of ten around all of them.
    fn of(rows: &[&Row]) -> Self {
        let logs = || rows.iter().map(|row| row.p50_ms.log10());
        let least = logs().fold(f64::INFINITY, f64::min);
        let most = logs().fold(f64::NEG_INFINITY, f64::max);
        // Counted, so that no float has to become an integer: from 100 ns to 1000 s.
        let powers = || -4..=6;
        let below = powers().rev().find(|power| f64::from(*power) < least);
        let above = powers().find(|power| f64::from(*power) >= most);
        let from = below.unwrap_or(-1);
        Self {
            from,
            to: above.unwrap_or(from).max(from + 1),
        }
    }

    fn length(&self, ms: f64) -> f64 {
        let all = f64::from(self.to - self.from);
        ((ms.log10() - f64::from(self.from)) / all * LENGTH).clamp(0.0, LENGTH)
    }
}

fn bar(row: &Row, y: f64, scale: &Scale) -> String {
    let class = match row.group {
        "host" | "native" | "gvisor" => row.group,
        _ => "other",
    };
    let length = scale.length(row.p50_ms);
    let (name, text_y) = (escape(&format!("{} {}", row.group, row.name)), y + 12.5);
    let (name_x, figure_x) = (LEFT - 8.0, LEFT + length + 6.0);
    format!(
        "<text x=\"{name_x}\" y=\"{text_y}\" class=\"name\">{name}</text>\
         <rect x=\"{LEFT}\" y=\"{y}\" width=\"{length:.1}\" height=\"{BAR_HEIGHT}\" rx=\"2\" class=\"{class}\"/>\
         <text x=\"{figure_x:.1}\" y=\"{text_y}\">{}</text>\n",
        figure(row.p50_ms)
    )
}

/// A line for each power of ten.
fn grid(scale: &Scale, bottom: f64) -> String {
    let mut lines = String::new();
    for power in scale.from..=scale.to {
        let ms = 10_f64.powi(power);
        let x = LEFT + scale.length(ms);
        let (top, above) = (TOP - 6.0, TOP - 10.0);
        let _ = writeln!(
            lines,
            "<line x1=\"{x:.1}\" y1=\"{top}\" x2=\"{x:.1}\" y2=\"{bottom}\"/>\
             <text x=\"{x:.1}\" y=\"{above}\" class=\"axis\">{ms}</text>"
        );
    }
    lines
}

/// Three digits are all that repeat from run to run.
fn figure(ms: f64) -> String {
    match ms {
        ms if ms >= 100.0 => format!("{ms:.0}"),
        ms if ms >= 10.0 => format!("{ms:.1}"),
        ms => format!("{ms:.2}"),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(group: &'static str, p50_ms: f64) -> Row {
        Row {
            group,
            name: "x<y",
            measured: 1,
            p50_ms,
            p95_ms: 0.0,
            p99_ms: 0.0,
            ratios: Vec::new(),
        }
    }

    fn lengths(svg: &str) -> Vec<f64> {
        let widths = svg.split("<rect ").skip(1);
        widths
            .map(|rect| {
                let width = rect.split("width=\"").nth(1).unwrap();
                width.split('"').next().unwrap().parse().unwrap()
            })
            .collect()
    }

    fn chart_of(times: &[f64]) -> String {
        let latency = Latency {
            rounds: 3,
            subjects: times.iter().map(|ms| row("native", *ms)).collect(),
            pools: Vec::new(),
        };
        chart(&latency, "a & b")
    }

    #[test]
    fn ten_times_as_long_is_one_step_further() {
        let lengths = lengths(&chart_of(&[1.0, 10.0, 100.0]));
        assert_eq!(lengths.len(), 3);
        let steps = (lengths[1] - lengths[0], lengths[2] - lengths[1]);
        assert!((steps.0 - steps.1).abs() < 0.2, "{lengths:?}");
        assert!(lengths[0] > 0.0 && lengths[2] <= LENGTH, "{lengths:?}");
    }

    #[test]
    fn a_chart_is_xml_for_light_and_dark() {
        let svg = chart_of(&[0.5, 200.0]);
        assert!(svg.starts_with("<svg xmlns"));
        assert!(svg.contains("prefers-color-scheme: dark"));
        assert!(svg.contains("x&lt;y") && svg.contains("a &amp; b"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        for tag in ["svg", "style", "text"] {
            let opened = svg.matches(&format!("<{tag}")).count();
            assert_eq!(opened, svg.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }

    #[test]
    fn nothing_measured_is_no_bar() {
        assert!(lengths(&chart_of(&[])).is_empty());
        assert!(lengths(&chart_of(&[0.0])).is_empty());
        assert_eq!(lengths(&chart_of(&[1.0])).len(), 1);
    }
}
