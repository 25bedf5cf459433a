//! Times and addresses as these programs' flags have always been written: in Go's way.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;
use tokio::net::TcpListener;

/// A longer time is a mistake, and sums of times stay far from overflowing.
const DURATION_SECONDS_MAX: f64 = 366.0 * 24.0 * 3600.0;

/// Where to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bind {
    /// Nowhere: written as nothing, or as `0`.
    Off,
    /// `:8080`, on every address.
    Any(u16),
    /// One address.
    At(SocketAddr),
}

/// A port that somebody else has, most likely.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} for {what}; is something else there?: {source}")]
pub struct NoListener {
    what: &'static str,
    address: String,
    source: std::io::Error,
}

/// `1h2m3.5s`, `200ms`, or a number of seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let seconds = match text.parse::<f64>() {
        Ok(seconds) => seconds,
        Err(_) => go_seconds(text).ok_or_else(|| {
            format!("{text:?} is not a time: write 90s, 1m30s, 200ms or a number of seconds")
        })?,
    };
    if !(0.0..=DURATION_SECONDS_MAX).contains(&seconds) {
        return Err(format!("{text:?} is not between 0 and a year"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn go_seconds(mut rest: &str) -> Option<f64> {
    let mut sum = 0.0;
    loop {
        let number_ends = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, unit_on) = rest.split_at(number_ends);
        let unit_ends = unit_on.find(|c: char| c.is_ascii_digit() || c == '.');
        let (unit, next) = unit_on.split_at(unit_ends.unwrap_or(unit_on.len()));
        let factor = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        sum += number.parse::<f64>().ok()? * factor;
        if next.is_empty() {
            return Some(sum);
        }
        rest = next;
    }
}

// === impl Bind ===

impl Bind {
    /// What to try, in this order: without IPv6 there is no `[::]`.
    fn candidates(self) -> Vec<SocketAddr> {
        match self {
            Self::Off => Vec::new(),
            Self::Any(port) => vec![
                (Ipv6Addr::UNSPECIFIED, port).into(),
                (Ipv4Addr::UNSPECIFIED, port).into(),
            ],
            Self::At(address) => vec![address],
        }
    }
}

impl Bind {
    /// Listens there for `what`, if anywhere.
    pub(crate) async fn listen(
        self,
        what: &'static str,
    ) -> Result<Option<TcpListener>, NoListener> {
        let mut last = None;
        for address in self.candidates() {
            match TcpListener::bind(address).await {
                Ok(listener) => {
                    let address = listener.local_addr().unwrap_or(address);
                    tracing::info!("listening on {address} for {what}");
                    return Ok(Some(listener));
                }
                // The first counts: the second is for machines without IPv6.
                Err(source) => last = last.or(Some(source)),
            }
        }
        match last {
            None => Ok(None),
            Some(source) => Err(NoListener {
                what,
                address: self.to_string(),
                source,
            }),
        }
    }
}

impl FromStr for Bind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() || text == "0" {
            return Ok(Self::Off);
        }
        if let Some(port) = text.strip_prefix(':') {
            let port = port.parse().map_err(|_| format!("{text:?} has no port"))?;
            return Ok(Self::Any(port));
        }
        let address = text.parse();
        address.map(Self::At).map_err(|_| {
            format!("{text:?} is not an address: write :8080, 10.0.0.1:8080 or [::1]:8080")
        })
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => Ok(()),
            Self::Any(port) => write!(f, ":{port}"),
            Self::At(address) => write!(f, "{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_go_and_python_write_them() {
        let millis = |text| duration(text).map(|time| time.as_millis());
        assert_eq!(millis("180"), Ok(180_000));
        assert_eq!(millis("0.5"), Ok(500));
        assert_eq!(millis("180s"), Ok(180_000));
        assert_eq!(millis("1h2m3.5s"), Ok(3_723_500));
        assert_eq!(millis("200ms"), Ok(200));
        assert_eq!(millis("0"), Ok(0));
        for wrong in [
            "", "s", "5x", "-1", "1s2", "NaN", "inf", "1e300", "9999999h",
        ] {
            assert!(duration(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn addresses_may_leave_the_host_out() {
        assert_eq!(":8080".parse(), Ok(Bind::Any(8080)));
        assert_eq!("".parse(), Ok(Bind::Off));
        assert_eq!("0".parse(), Ok(Bind::Off));
        let local = "127.0.0.1:1".parse();
        assert!(matches!(local, Ok(Bind::At(address)) if address.port() == 1));
        assert!("localhost:1".parse::<Bind>().is_err());
        assert!(":x".parse::<Bind>().is_err());
    }
}
