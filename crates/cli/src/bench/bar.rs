//! What a figure is held against: a baseline of the same run, and the bar we set ourselves.

use serde::Serialize;

/// Where a figure must stay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Bar {
    AtMost(f64),
    AtLeast(f64),
}

/// A figure held against its bar; both are none where there is no bar, or no figure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Verdict {
    bar: Option<f64>,
    met: Option<bool>,
    #[serde(skip)]
    sign: &'static str,
}

/// A figure over the same figure of something else.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Ratio {
    /// Which figure: p50, p99, per_s.
    pub(super) of: &'static str,
    /// What p50 (or rate) it is divided by.
    pub(super) baseline: String,
    /// None when the baseline was not measured.
    pub(super) ratio: Option<f64>,
    #[serde(flatten)]
    pub(super) verdict: Verdict,
}

// === impl Verdict ===

impl Verdict {
    pub(super) fn new(figure: Option<f64>, bar: Option<Bar>) -> Self {
        let (bar, sign, holds): (_, _, fn(f64, f64) -> bool) = match bar {
            None => (None, "", |_, _| true),
            Some(Bar::AtMost(bar)) => (Some(bar), "≤", |figure, bar| figure <= bar),
            Some(Bar::AtLeast(bar)) => (Some(bar), "≥", |figure, bar| figure >= bar),
        };
        let met = figure.zip(bar).map(|(figure, bar)| holds(figure, bar));
        Self { bar, met, sign }
    }

    pub(super) fn met(&self) -> Option<bool> {
        self.met
    }

    /// As in `≤ 2.00 ok`; empty without a bar.
    pub(super) fn mark(&self) -> String {
        let Some(bar) = self.bar else {
            return String::new();
        };
        let mark = match self.met {
            Some(true) => "ok",
            Some(false) => "MISSED",
            None => "not measured",
        };
        format!("{} {bar:.2} {mark}", self.sign)
    }
}

// === impl Ratio ===

impl Ratio {
    pub(super) fn new(
        of: &'static str,
        figure: f64,
        baseline: &str,
        base: Option<f64>,
        bar: Option<Bar>,
    ) -> Self {
        let base = base.filter(|base| *base > 0.0);
        let ratio = base.map(|base| figure / base);
        Self {
            of,
            baseline: baseline.to_owned(),
            ratio,
            verdict: Verdict::new(ratio, bar),
        }
    }

    /// As in `0.83 × fork+exec, ≤ 1.00 ok`.
    pub(super) fn text(&self) -> String {
        let ratio = self.ratio.map_or("-".to_owned(), |r| format!("{r:.2}"));
        let of = if self.of == "p99" { "p99 " } else { "" };
        let mark = self.verdict.mark();
        let comma = if mark.is_empty() { "" } else { ", " };
        format!("{of}{ratio} × {}{comma}{mark}", self.baseline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_met_up_to_itself() {
        let met = |figure, bar| Verdict::new(Some(figure), Some(bar)).met();
        assert_eq!(met(2.0, Bar::AtMost(2.0)), Some(true));
        assert_eq!(met(2.01, Bar::AtMost(2.0)), Some(false));
        assert_eq!(met(3.0, Bar::AtLeast(3.0)), Some(true));
        assert_eq!(met(2.9, Bar::AtLeast(3.0)), Some(false));
        assert_eq!(Verdict::new(Some(1.0), None).met(), None);
    }

    #[test]
    fn ratios_say_what_they_are_to_and_whether_that_is_good() {
        let ratio = |figure, base, bar| Ratio::new("p50", figure, "fork+exec", base, bar);
        let good = ratio(1.5, Some(1.0), Some(Bar::AtMost(2.0)));
        assert_eq!(good.text(), "1.50 × fork+exec, ≤ 2.00 ok");
        let bad = ratio(5.0, Some(2.0), Some(Bar::AtMost(2.0)));
        assert_eq!(bad.text(), "2.50 × fork+exec, ≤ 2.00 MISSED");
        assert_eq!(ratio(5.0, Some(2.0), None).text(), "2.50 × fork+exec");
        // What was not measured cannot be compared with.
        for base in [None, Some(0.0)] {
            let unknown = ratio(5.0, base, Some(Bar::AtMost(2.0)));
            assert_eq!(unknown.text(), "- × fork+exec, ≤ 2.00 not measured");
            assert_eq!(unknown.verdict.met(), None);
        }
        let json = serde_json::to_value(bad).unwrap();
        let expected = serde_json::json!({
            "of": "p50", "baseline": "fork+exec", "ratio": 2.5, "bar": 2.0, "met": false
        });
        assert_eq!(json, expected);
    }
}
