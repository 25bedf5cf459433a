//! The `grpc-timeout` header: the deadline that a gRPC client gives its call.

use hyper::HeaderMap;
use std::time::Duration;
use tokio::time::{Instant, error::Elapsed, timeout_at};

/// Digits of the number, by gRPC's specification.
const DIGITS_MAX: usize = 8;

/// How long the client gives its call; none when it sent no such header, or one that cannot be read.
#[must_use]
pub fn of(headers: &HeaderMap) -> Option<Duration> {
    parse(headers.get("grpc-timeout")?.to_str().ok()?)
}

/// The output of `call`, or an error at the deadline, if there is one. The time counts from now, not from the first poll.
pub fn within<T>(
    limit: Option<Duration>,
    call: impl Future<Output = T>,
) -> impl Future<Output = Result<T, Elapsed>> {
    let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    async move {
        match deadline {
            Some(deadline) => timeout_at(deadline, call).await,
            None => Ok(call.await),
        }
    }
}

/// Digits and a unit.
fn parse(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_number = (1..=DIGITS_MAX).contains(&number.len())
        && number.bytes().all(|byte| byte.is_ascii_digit());
    let number = number.parse().ok().filter(|_| is_number)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read() {
        assert_eq!(parse("1H"), Some(Duration::from_secs(3600)));
        assert_eq!(parse("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse("5S"), Some(Duration::from_secs(5)));
        assert_eq!(parse("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(parse("7u"), Some(Duration::from_micros(7)));
        assert_eq!(parse("7n"), Some(Duration::from_nanos(7)));
        let longest = Duration::from_secs(99_999_999 * 3600);
        assert_eq!(parse("99999999H"), Some(longest));
        for bad in ["", "S", "5", "5x", "-5S", "+1S", "123456789S", "5€"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_counts_from_the_start_of_the_call() {
        let second = Duration::from_secs(1);
        let late = within(Some(second), std::future::pending::<()>());
        tokio::time::advance(second).await;
        let begun = Instant::now();
        assert!(late.await.is_err());
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert_eq!(within(None, async { 7 }).await, Ok(7));
    }
}
