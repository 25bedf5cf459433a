//! Ports and networks that nobody uses: several clusters live on one machine, and none may be in
//! the way of another.

use crate::Error;
use std::net::{Ipv4Addr, TcpListener};

/// Below the range from which the kernel takes ports of outgoing connections: a port stays free
/// while its server is stopped and started again.
const PORTS: std::ops::Range<u16> = 20_000..30_000;

/// Tries before giving up: with this many, it is not chance.
const TRIES_MAX: usize = 200;

/// A port of the loopback address that nobody listens on.
pub(crate) fn free_port() -> Result<u16, Error> {
    let width = u32::from(PORTS.end - PORTS.start);
    for _ in 0..TRIES_MAX {
        let offset = u16::try_from(random() % width).unwrap_or(0);
        let port = PORTS.start + offset;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
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
