//! Socket buffer limits: lowers the sysctls of the sandbox's network namespace.
//!
//! The memory cgroup of the sandbox accounts for most socket memory, but not all on every kernel,
//! and what it sends to the gate is queued in sockets of the server. All connections in the namespace
//! are local, so larger buffers would not make them faster.

use std::fs;
use std::io;

/// Largest TCP send and receive buffer, in bytes: Linux' own default for sending.
const TCP_BUFFER_BYTES_MAX: u64 = 4 << 20;

/// Largest memory for options and filters of one socket, in bytes: Linux' default before 6.7.
const OPTIONS_BYTES_MAX: u64 = 20_480;

/// TCP Fast Open connects without `connect`, so the seccomp notifier that counts sockets would
/// miss it. It is switched off.
const FAST_OPEN: &str = "/proc/sys/net/ipv4/tcp_fastopen";

const TCP_BUFFERS: [&str; 2] = ["/proc/sys/net/ipv4/tcp_rmem", "/proc/sys/net/ipv4/tcp_wmem"];

/// Per network namespace since Linux 6.9; before, the file is not there.
const OPTIONS: &str = "/proc/sys/net/core/optmem_max";

/// Lowers the limits of this thread's network namespace that are higher than the constants above.
pub(super) fn lower() -> io::Result<()> {
    for path in TCP_BUFFERS {
        // Minimum, initial and maximum size.
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
        // A sysctl of the host, not of the namespace.
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
    fn buffer_limits_are_lowered_in_the_namespace_and_not_on_the_host() {
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
                // Lower values stay.
                fs::write(path, "4096 8192 16384").unwrap();
            }
            lower().unwrap();
            for path in TCP_BUFFERS {
                assert_eq!(read(path).trim(), "4096\t8192\t16384", "{path}");
            }
        })
        .join()
        .unwrap();
        assert_eq!(
            TCP_BUFFERS.map(read),
            hosts,
            "limits of the host were changed"
        );
    }
}
