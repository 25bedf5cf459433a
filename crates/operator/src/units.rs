//! Flag values in the notation of Go programs: durations (`1m30s`) and bind addresses (`:8080`).

use k8e_net::go_duration;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;
use tokio::net::TcpListener;

/// Longest duration, a year. A longer one is a mistake, and sums of durations cannot overflow.
const DURATION_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

/// A bind address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bind {
    /// Do not listen: written as an empty string, or as `0`.
    Off,
    /// A port on every address: `:8080`.
    Any(u16),
    /// A port on one address: `10.0.0.1:8080`.
    At(SocketAddr),
}

/// A bind address that could not be bound; most likely another process listens there.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} for {what}; does another process use it?: {source}")]
pub struct NoListener {
    what: &'static str,
    address: String,
    source: std::io::Error,
}

/// Parses `1h2m3.5s`, `200ms`, or a number of seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("{text:?} is not a time: write 90s, 1m30s, 200ms or a number of seconds");
    let time = match text.parse() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => go_duration::parse(text),
    };
    let time = time.ok_or_else(wrong)?;
    if time > DURATION_MAX {
        return Err(format!("{text:?} is longer than a year"));
    }
    Ok(time)
}

// === impl Bind ===

impl Bind {
    /// Addresses to try, in order: on a machine without IPv6, `[::]` cannot be bound.
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
    /// Binds a listener for `what` (named in logs and errors). `None` when it is off.
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
                // The first error is reported: the second attempt is only for machines without IPv6.
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
    fn durations_are_parsed_in_go_notation_and_as_seconds() {
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
    fn bind_addresses_may_omit_the_host() {
        assert_eq!(":8080".parse(), Ok(Bind::Any(8080)));
        assert_eq!("".parse(), Ok(Bind::Off));
        assert_eq!("0".parse(), Ok(Bind::Off));
        let local = "127.0.0.1:1".parse();
        assert!(matches!(local, Ok(Bind::At(address)) if address.port() == 1));
        assert!("localhost:1".parse::<Bind>().is_err());
        assert!(":x".parse::<Bind>().is_err());
    }
}
