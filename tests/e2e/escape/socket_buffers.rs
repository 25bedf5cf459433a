//! Attempts to hold more of the host's memory than the sandbox has, in what sockets and pipes wait with.
//!
//! What counts is the host's memory, not what the control group counts of it: that is what may be wrong.

use k8e_e2e::Server;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Of each attacker.
const LIMIT_BYTES: u64 = 64 * MIB;

/// What may be held beyond the limit: buffers that the kernel of this machine does not count as memory
/// (a quarter of the limit), what it grants each of a bounded number of sockets in any case, and what
/// else happens on the machine meanwhile.
const RESERVE_BYTES: u64 = 144 * MIB;

const TRIES: u32 = 3;
const SAMPLES: u32 = 20;

/// Longest time that filling takes on a machine under load.
const FILL_WAIT: Duration = Duration::from_secs(100);

/// Fills as much as it can, says so, and holds it until it is told to stop. `more` fills one more and
/// raises an error when there is no more to be had. Not without bounds: where nothing stops it, this is
/// a gigabyte or two, and the machine lives on.
const FILL: &str = r#"
import os, resource, socket, struct, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
kept = []
def fill(s, block=b"x" * 65000):
    s.setblocking(False)
    try:
        for _ in range(10): s.send(block)
    except OSError: pass
    kept.append(s)
def large(s):
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF): s.setsockopt(socket.SOL_SOCKET, option, 1 << 24)
    return s
MORE
count = 0
try:
    while count < 2000: more(); count += 1
except (OSError, MemoryError) as e: print("stopped", e)
open("/workspace/filled", "w").write(str(count))
while not os.path.exists("/workspace/stop"): time.sleep(0.05)
"#;

/// Holds what it can get, and is looked at from outside. Others use memory meanwhile, so it is looked
/// again before it counts as an escape.
fn hold(flags: &[&str], more: &str) {
    let server = Server::start_with(flags);
    let script = FILL.replace("MORE", more);
    let mut least = u64::MAX;
    for _ in 0..TRIES {
        least = least.min(held(&server, &script));
        if least < LIMIT_BYTES + RESERVE_BYTES {
            return;
        }
    }
    panic!(
        "a sandbox of 64 MiB held {} MiB of the host's memory",
        least / MIB
    );
}

fn held(server: &Server, script: &str) -> u64 {
    let session = server.session_with(&["--memory", "64MiB"]);
    let most = std::thread::scope(|scope| {
        let run = scope.spawn(|| session.run(&["--timeout", "180", "--lang", "python"], script));
        let started = Instant::now();
        let filled = || server.k8e(&["sandbox", "read", "--raw", &session.id, "filled"]);
        // Ended by the kernel is as good as held back.
        while !run.is_finished() && filled().code != 0 {
            assert!(started.elapsed() < FILL_WAIT, "it does not get done");
            std::thread::sleep(Duration::from_millis(20));
        }
        let count = filled().out();
        let most = kernel_bytes();
        server.k8e_with(&["sandbox", "write", &session.id, "stop"], b"");
        let ran = run.join().unwrap();
        assert!(
            ran.code != 0 || count.parse::<u32>().is_ok_and(|count| count > 0),
            "the attempt was not made: {}",
            ran.all()
        );
        most
    });
    // A gVisor sandbox may have ended with its kernel: that is no error here.
    server.k8e(&["sandbox", "destroy", &session.id]);
    most.saturating_sub(kernel_bytes())
}

/// What the host's kernel has for itself: not free, and neither a process's nor a file's. The least within a
/// moment: buffers are freed a little after their sockets.
fn kernel_bytes() -> u64 {
    let samples = (0..SAMPLES).map(|_| {
        std::thread::sleep(Duration::from_millis(30));
        kernel_bytes_now()
    });
    samples.min().unwrap_or_default()
}

fn kernel_bytes_now() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap();
    let kib = |name: &str| -> u64 {
        let line = info.lines().find_map(|line| line.strip_prefix(name));
        let number = line.unwrap().trim_start_matches(':').trim();
        number.split(' ').next().unwrap().parse().unwrap()
    };
    let others = ["MemFree", "Cached", "Buffers", "AnonPages", "SReclaimable"];
    let others: u64 = others.into_iter().map(kib).sum();
    kib("MemTotal").saturating_sub(others) << 10
}

const TCP: &str = "\
listener = socket.create_server(('127.0.0.1', 0), backlog=4096)
def more():
    a = large(socket.socket()); a.connect(listener.getsockname())
    b = large(listener.accept()[0])
    fill(a); fill(b)
";

const UDP: &str = "\
def more():
    a = large(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    a.bind(('127.0.0.1', 0)); a.connect(a.getsockname()); a.setblocking(False)
    for _ in range(10): a.send(b'x' * 60000)
    kept.append(a)
";

const UNIX: &str = "\
def more():
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        for s in socket.socketpair(socket.AF_UNIX, kind): fill(large(s), b'x' * 32000)
";

#[test]
fn hold_memory_in_tcp() {
    hold(&[], TCP);
}

#[test]
fn hold_memory_in_udp() {
    hold(&[], UDP);
}

#[test]
fn hold_memory_in_unix_sockets() {
    hold(&[], UNIX);
}

#[test]
fn hold_memory_in_datagrams_that_are_not_sent() {
    hold(
        &[],
        "\
def more():
    a = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); a.connect(('127.0.0.1', 9))
    a.send(b'x' * 60000, 0x8000)       # MSG_MORE
    kept.append(a)
",
    );
}

#[test]
fn hold_memory_in_answers_of_the_kernel() {
    // Each wrong request of netlink is answered with a copy of it.
    hold(
        &[],
        "\
wrong = struct.pack('=IHHII', 16016, 9999, 5, 1, 0) + bytes(16000)
def more():
    a = large(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)); a.setblocking(False)
    for _ in range(40):
        try: a.send(wrong)
        except OSError: break
    kept.append(a)
",
    );
}

#[test]
fn hold_memory_in_pipes() {
    hold(
        &[],
        "\
import fcntl
def more():
    r, w = os.pipe(); os.set_blocking(w, False)
    try: fcntl.fcntl(w, 1031, 1 << 20)
    except OSError: pass
    try:
        while True: os.write(w, b'x' * 65536)
    except BlockingIOError: pass
",
    );
}

#[test]
fn hold_memory_in_message_queues() {
    hold(
        &[],
        "\
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
message = ctypes.create_string_buffer(struct.pack('=q', 1) + b'x' * 8000)
def more():
    queue = libc.msgget(0, 0o1600)
    if queue < 0: raise OSError(ctypes.get_errno(), 'msgget')
    while libc.msgsnd(queue, message, 8000, 0o4000) == 0: pass
",
    );
}

#[test]
fn hold_memory_in_sockets_of_gvisor() {
    for more in [TCP, UDP, UNIX] {
        hold(&["--default-runtime", "gvisor"], more);
    }
}
