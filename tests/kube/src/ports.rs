//! Ports and networks that nobody uses: several clusters live on one machine, and none may be in
//! the way of another.

use crate::Error;
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Mutex, PoisonError};

/// Below the range from which the kernel takes ports of outgoing connections: a port stays free
/// while its server is stopped and started again.
const PORTS: std::ops::Range<u16> = 20_000..30_000;

/// Tries before giving up: with this many, it is not chance.
const TRIES_MAX: usize = 200;

/// Ports that this process was given: the server of one may not listen yet when the next is asked for.
static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// A port of the loopback address that nobody listens on, and that nobody here was given before.
pub(crate) fn free_port() -> Result<u16, Error> {
    let width = u32::from(PORTS.end - PORTS.start);
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    for _ in 0..TRIES_MAX {
        let offset = u16::try_from(random() % width).unwrap_or(0);
        let port = PORTS.start + offset;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() && given.insert(port) {
            return Ok(port);
        }
    }
    Err(Error::NothingFree("port"))
}

/// A random number. Collisions are found by trying, so when the kernel has none to give, the
/// process id will do.
pub(crate) fn random() -> u32 {
    getrandom::u32().unwrap_or_else(|_| std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_given_once() {
        // So many that, chosen at random, two would be equal.
        let ports: Vec<u16> = (0..1000).map(|_| free_port().unwrap()).collect();
        let different: BTreeSet<&u16> = ports.iter().collect();
        assert_eq!(different.len(), ports.len());
    }
}
