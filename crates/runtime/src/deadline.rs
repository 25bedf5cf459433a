//! Ends a gRPC call at the deadline its client gave. The call is dropped then, and with it the command
//! it runs.

use hyper::HeaderMap;
use std::time::Duration;
use tokio::time::{Instant, error::Elapsed, timeout_at};

/// gRPC's own bound.
const DIGITS_MAX: usize = 8;

/// How long a client gives its call; none when it does not say, or not in a way that can be read.
pub(crate) fn of(headers: &HeaderMap) -> Option<Duration> {
    parse(headers.get("grpc-timeout")?.to_str().ok()?)
}

/// The answer, if it comes in time.
pub(crate) async fn within<T>(
    limit: Option<Duration>,
    answer: impl Future<Output = T>,
) -> Result<T, Elapsed> {
    match limit.and_then(|limit| Instant::now().checked_add(limit)) {
        Some(deadline) => timeout_at(deadline, answer).await,
        None => Ok(answer.await),
    }
}

fn parse(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let digits = (1..=DIGITS_MAX).contains(&number.len())
        && number.bytes().all(|byte| byte.is_ascii_digit());
    let number = number.parse().ok().filter(|_| digits)?;
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
    fn deadlines_are_those_of_grpc() {
        assert_eq!(parse("5S"), Some(Duration::from_secs(5)));
        assert_eq!(parse("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(
            parse("99999999H"),
            Some(Duration::from_secs(99_999_999 * 3600))
        );
        for bad in ["", "S", "5", "5x", "-5S", "123456789S", "5€"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
