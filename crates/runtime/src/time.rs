//! Formats file times: RFC 3339 and HTTP dates.

use std::time::{Duration, UNIX_EPOCH};

/// `2026-11-16T09:00:00Z`, from nanoseconds since the Unix epoch.
pub(crate) fn rfc3339(unix_ns: i64) -> String {
    let seconds = unix_ns.div_euclid(1_000_000_000);
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// `Mon, 16 Nov 2026 09:00:00 GMT`; times before 1970 become 1970.
pub(crate) fn http_date(unix_ns: i64) -> String {
    let since = Duration::from_nanos(u64::try_from(unix_ns).unwrap_or(0));
    httpdate::fmt_http_date(UNIX_EPOCH + since)
}

/// Year, month and day (Gregorian calendar) of a number of days since the Unix epoch.
fn civil(days: i64) -> (i64, i64, i64) {
    // Counted from the first of March of the year 0: a leap day is then the last of its year.
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_times_are_formatted_also_before_1970() {
        let at = |seconds: i64| rfc3339(seconds * 1_000_000_000);
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_794_819_599), "2026-11-16T08:59:59Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00Z");
        assert_eq!(rfc3339(-1), "1969-12-31T23:59:59Z");
        assert_eq!(http_date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(http_date(-5), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(http_date(i64::MAX), "Fri, 11 Apr 2262 23:47:16 GMT");
    }
}
