//! Parsers for flag values: sizes, CPUs, durations, NAME=value pairs, file modes.

use std::time::Duration;

/// A duration, or no end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// A finite duration.
    For(Duration),
    /// Unlimited.
    Never,
}

/// Parses `512MiB`, `4GiB`, `1.5g`, `1048576` into bytes. Units are powers of 1024.
pub fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size: write 512MiB, 4GiB or a number of bytes");
    let (number, unit) = split(text).ok_or_else(wrong)?;
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(wrong()),
    };
    scaled(number, 1u64 << shift).ok_or_else(wrong)
}

/// Parses `1`, `0.5`, `1.5` CPUs; returns thousandths of a CPU.
pub fn cpus(text: &str) -> Result<u32, String> {
    let wrong = || format!("{text:?} is not a number of CPUs: write 1, 0.5 or 2");
    let millis = scaled(text, 1000).and_then(|millis| u32::try_from(millis).ok());
    millis.filter(|millis| *millis > 0).ok_or_else(wrong)
}

/// Parses `30` (seconds), `2.5`, `500ms`, `30s`, `10m`, `2h`, `7d`; `never` and `0` are [`Span::Never`].
pub fn span(text: &str) -> Result<Span, String> {
    let wrong = || format!("{text:?} is not a time: write 30s, 10m, 2h or never");
    if matches!(text, "never" | "none") {
        return Ok(Span::Never);
    }
    let (number, unit) = split(text).ok_or_else(wrong)?;
    let unit_ms = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wrong()),
    };
    match scaled(number, unit_ms).ok_or_else(wrong)? {
        0 if number.contains(|c| matches!(c, '1'..='9')) => Ok(Span::For(Duration::from_millis(1))),
        0 => Ok(Span::Never),
        ms => Ok(Span::For(Duration::from_millis(ms))),
    }
}

/// Parses `NAME=value`.
pub fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not NAME=value")),
    }
}

/// Parses an octal file mode, as `0755`.
pub fn permissions(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text.trim_start_matches("0o"), 8)
        .ok()
        .filter(|mode| *mode <= 0o7777)
        .ok_or_else(|| format!("{text:?} is not a file mode: write 0644 or 0755"))
}

// === impl Span ===

impl Span {
    /// Seconds as in a request; -1 is never.
    pub fn wire_seconds(self) -> i64 {
        match self {
            // Rounded up: 0 would mean the default.
            Self::For(time) => i64::try_from(time.as_millis().div_ceil(1000)).unwrap_or(i64::MAX),
            Self::Never => -1,
        }
    }

    /// Milliseconds as in a request; -1 is never.
    pub fn wire_millis(self) -> i64 {
        match self {
            Self::For(time) => i64::try_from(time.as_millis()).unwrap_or(i64::MAX),
            Self::Never => -1,
        }
    }

    /// `None` for [`Span::Never`].
    pub fn into_option(self) -> Option<Duration> {
        match self {
            Self::For(time) => Some(time),
            Self::Never => None,
        }
    }
}

/// Splits text into number and unit.
fn split(text: &str) -> Option<(&str, &str)> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    (end > 0).then(|| (&text[..end], text[end..].trim_start()))
}

/// A decimal number times `unit`, without floating point.
fn scaled(number: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    // 18 digits are exact in u128 with every unit here.
    if !(1..=18).contains(&number.len()) || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let parse = |digits: &str| {
        if digits.is_empty() {
            Some(0)
        } else {
            digits.parse::<u64>().ok()
        }
    };
    let part = u128::from(parse(fraction)?) * u128::from(unit)
        / 10u128.pow(u32::try_from(fraction.len()).ok()?);
    let total = u128::from(parse(whole)?) * u128::from(unit) + part;
    u64::try_from(total).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let check = |text: &str, want: u64| assert_eq!(size(text), Ok(want), "{text}");
        check("1048576", 1 << 20);
        check("512MiB", 512 << 20);
        check("512 MiB", 512 << 20);
        check("4G", 4 << 30);
        check("1.5k", 1536);
        check("0", 0);
        for bad in [
            "",
            "MiB",
            "-1",
            "1x",
            "1.2.3G",
            "99999999999999999999",
            "9999999999T",
        ] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn cpu_counts() {
        assert_eq!(cpus("1"), Ok(1000));
        assert_eq!(cpus("1.5"), Ok(1500));
        assert_eq!(cpus(".25"), Ok(250));
        for bad in ["", "0", "two", "-1", "0.0001", "99999999"] {
            assert!(cpus(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn spans() {
        let check = |text: &str, want_ms: u64| {
            assert_eq!(
                span(text),
                Ok(Span::For(Duration::from_millis(want_ms))),
                "{text}"
            );
        };
        check("30", 30_000);
        check("0.25", 250);
        check("0.0001", 1);
        check("500ms", 500);
        check("10m", 600_000);
        check("2h", 7_200_000);
        for never in ["0", "never", "none", "0.0"] {
            assert_eq!(span(never), Ok(Span::Never), "{never}");
        }
        for bad in ["", "soon", "-1", "1 fortnight", "s", "."] {
            assert!(span(bad).is_err(), "{bad}");
        }
        assert_eq!(span("0.25").unwrap().wire_seconds(), 1);
        assert_eq!(span("0.25").unwrap().wire_millis(), 250);
        assert_eq!(Span::Never.wire_millis(), -1);
    }

    #[test]
    fn pairs_and_permissions() {
        assert_eq!(pair("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(pair("A="), Ok(("A".into(), String::new())));
        assert!(pair("A").is_err());
        assert!(pair("=b").is_err());
        assert_eq!(permissions("0755"), Ok(0o755));
        assert_eq!(permissions("644"), Ok(0o644));
        assert!(permissions("rwx").is_err());
        assert!(permissions("77777").is_err());
    }
}
