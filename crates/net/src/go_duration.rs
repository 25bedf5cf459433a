//! Durations as Go writes them (`time.ParseDuration`): `10s`, `1m30s`, `1.5h`, `300ms`, and `0`.
//!
//! Without a sign: a timeout is not negative.

use std::time::Duration;

/// Reads a duration; none when `text` is not one, or is longer than a [`Duration`] can be.
#[must_use]
pub fn parse(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let number_ends = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(number_ends);
        let unit_ends = tail
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_ends);
        let seconds = number.parse::<f64>().ok()? * seconds_of(unit)?;
        total = total.checked_add(Duration::try_from_secs_f64(seconds).ok()?)?;
        rest = tail;
    }
    (!text.is_empty()).then_some(total)
}

fn seconds_of(unit: &str) -> Option<f64> {
    Some(match unit {
        "h" => 3600.0,
        "m" => 60.0,
        "s" => 1.0,
        "ms" => 1e-3,
        "us" | "µs" => 1e-6,
        "ns" => 1e-9,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_those_of_go() {
        let millis = |text| parse(text).map(|time| time.as_millis());
        assert_eq!(millis("10s"), Some(10_000));
        assert_eq!(millis("1h2m3.5s"), Some(3_723_500));
        assert_eq!(millis("300ms"), Some(300));
        assert_eq!(millis("2000us"), Some(2));
        assert_eq!(millis("0"), Some(0));
        for bad in [
            "", "10", "s", "-1s", "+1s", "1d", "1..s", "1s2", "1e3s", "NaN",
        ] {
            assert_eq!(millis(bad), None, "{bad}");
        }
        assert_eq!(parse(&format!("{}h", "9".repeat(400))), None);
    }
}
