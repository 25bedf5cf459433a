//! The most that one socket of the namespace may hold, whatever the host's own sockets may.
//!
//! The sandbox's memory limit counts most of it, but not all on every kernel, and what it sends to
//! the gate waits in sockets of the server. Nothing in the namespace is further away than
//! loopback, so large buffers would buy no speed.

use std::fs;
use std::io;

/// Bytes that wait in one TCP connection, each way: Linux' own default for sending.
const TCP_BUFFER_BYTES_MAX: u64 = 4 << 20;

/// Options and filters of one socket: Linux' own default before 6.7.
const OPTIONS_BYTES_MAX: u64 = 20_480;

/// A connection without `connect`: who counts connections would miss it.
const FAST_OPEN: &str = "/proc/sys/net/ipv4/tcp_fastopen";

const TCP_BUFFERS: [&str; 2] = ["/proc/sys/net/ipv4/tcp_rmem", "/proc/sys/net/ipv4/tcp_wmem"];

/// From Linux 6.9 on each namespace has its own; before, this file is not there.
const OPTIONS: &str = "/proc/sys/net/core/optmem_max";

/// Lowers what is higher in this thread's network namespace.
pub(super) fn lower() -> io::Result<()> {
    for path in TCP_BUFFERS {
        // The least, what a connection begins with, and the most.
        let now = fs::read_to_string(path)?;
        let lowered: Vec<String> = now
            .split_whitespace()
            .map(|bytes| at_most(bytes, TCP_BUFFER_BYTES_MAX))
            .collect();
        fs::write(path, lowered.join(" "))?;
    }
    fs::write(FAST_OPEN, "0")?;
    let Ok(now) = fs::read_to_string(OPTIONS) else {
        return Ok(());
    };
    match fs::write(OPTIONS, at_most(now.trim(), OPTIONS_BYTES_MAX)) {
        // The machine's, not the namespace's.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        done => done,
    }
}

fn at_most(bytes: &str, most: u64) -> String {
    let bytes = bytes.parse().unwrap_or(most);
    most.min(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys;

    #[test]
    fn a_connection_holds_no_more_than_it_may() {
        let read = |path: &str| fs::read_to_string(path).unwrap();
        let hosts = TCP_BUFFERS.map(read);
        std::thread::spawn(move || {
            sys::new_namespace().expect("this test makes a network namespace: run it as root");
            let high = "4096 131072 33554432";
            for path in TCP_BUFFERS {
                fs::write(path, high).unwrap();
            }
            lower().unwrap();
            for path in TCP_BUFFERS {
                assert_eq!(read(path).trim(), "4096\t131072\t4194304", "{path}");
                // Who has less keeps it.
                fs::write(path, "4096 8192 16384").unwrap();
            }
            lower().unwrap();
            for path in TCP_BUFFERS {
                assert_eq!(read(path).trim(), "4096\t8192\t16384", "{path}");
            }
        })
        .join()
        .unwrap();
        assert_eq!(TCP_BUFFERS.map(read), hosts, "the host's own were changed");
    }
}
