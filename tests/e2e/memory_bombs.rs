//! Memory bombs of many shapes, on both runtimes. Each kills a process, not the session: the session answers
//! afterwards, its files are there, the status says what happened, and the neighbour noticed nothing.

use k8e_api::client::{Client, Endpoint};
use k8e_api::v1::{self, terminal_event::Event};
use k8e_e2e::{Server, Session};
use serde_json::Value;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What a session of these tests may use. Node alone takes 50 MiB to start.
const MEMORY: &str = "128MiB";

/// No bomb takes longer to go off, on a machine that runs other tests as well.
const SOON: Duration = Duration::from_secs(60);

/// How a run must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It is killed for memory, and says so.
    Killed,
    /// It completes; something that it started is killed for memory.
    ChildKilled,
    /// It, or something that it started and that is as large, is killed for memory.
    AnyKilled,
    /// It is no bomb, or meets another limit first.
    Completes,
}

use End::{AnyKilled, ChildKilled, Completes, Killed};

/// What runs it, its name, its code, and how that ends.
type Bomb = (&'static str, &'static str, &'static str, End);

/// Python whose child process is killed ends as a shell would: with 137.
const BOMBS: [Bomb; 54] = [
    // No bombs: what fits, what is page cache, what meets the end of a file system.
    (
        "python",
        "two thirds of the limit fit",
        "x = b'x' * (84 << 20); print(len(x))",
        Completes,
    ),
    (
        "node",
        "a small program fits",
        "const b = Buffer.alloc(16 << 20, 1); console.log(b.length)",
        Completes,
    ),
    (
        "bash",
        "writes through the page cache",
        "head -c 400M /dev/zero > big && ls -s big",
        Completes,
    ),
    (
        "bash",
        "reads through the page cache",
        "cat big > /dev/null && wc -c < big",
        Completes,
    ),
    (
        "bash",
        "copies a large file",
        "cp big big2 && rm big2",
        Completes,
    ),
    (
        "python",
        "sync and read it back",
        "
import os
f = open('again', 'wb')
for _ in range(150): f.write(b'y' * (1 << 20))
os.fsync(f.fileno()); f.close()
n = 0
with open('again', 'rb') as f:
    while (d := f.read(1 << 20)): n += len(d)
os.unlink('again')
assert n == 150 << 20",
        Completes,
    ),
    (
        "python",
        "maps a large file and reads it",
        "
import mmap
f = open('big', 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
n = sum(m[i] for i in range(0, len(m), 4096)); print(n)",
        Completes,
    ),
    (
        "bash",
        "fills shared memory to its size",
        "! head -c 400M /dev/zero > /dev/shm/x; rm /dev/shm/x",
        Completes,
    ),
    (
        "python",
        "allocates and frees over and over",
        "
for _ in range(40): x = b'x' * (40 << 20); del x",
        Completes,
    ),
    (
        "bash",
        "many processes that fit",
        "for i in $(seq 8); do sleep 0.2 & done; wait",
        Completes,
    ),
    // Fast.
    (
        "python",
        "1 MiB at a time",
        "x = []\nwhile True: x.append(b'x' * (1 << 20))",
        Killed,
    ),
    (
        "python",
        "8 MiB at a time",
        "x = [b'x' * (8 << 20) for _ in range(300)]",
        Killed,
    ),
    (
        "python",
        "64 KiB at a time",
        "x = [b'x' * (1 << 16) for _ in range(60000)]",
        Killed,
    ),
    ("python", "1 GiB at once", "x = b'x' * (1 << 30)", Killed),
    (
        "python",
        "3 GiB by memset",
        "
import ctypes, mmap
m = mmap.mmap(-1, 3 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(m)), 1, 3 << 30)",
        Killed,
    ),
    ("bash", "C: memset of 2 GiB", "./bomb memset", Killed),
    ("bash", "C: populated mappings", "./bomb populate", Killed),
    ("bash", "C: malloc that is touched", "./bomb malloc", Killed),
    (
        "bash",
        "C: in a pipeline",
        "./bomb memset | cat; exit ${PIPESTATUS[0]}",
        Killed,
    ),
    ("bash", "C: brk", "./bomb brk", Killed),
    ("bash", "C: threads", "./bomb threads", Killed),
    ("bash", "C: every second page", "./bomb sparse", Killed),
    ("bash", "C: forks that write", "./bomb forks", Killed),
    (
        "bash",
        "tail of what has no lines",
        "tail /dev/zero",
        Killed,
    ),
    (
        "bash",
        "perl hash",
        "exec perl -e '$h{$i++} = \"x\" x 900 while 1'",
        Killed,
    ),
    (
        "bash",
        "perl string",
        "exec perl -e '$x .= \"x\" x 1000000 while 1'",
        Killed,
    ),
    (
        "bash",
        "perl array",
        "exec perl -e 'push @x, \"x\" x 5000 while 1'",
        Killed,
    ),
    (
        "bash",
        "awk array",
        "exec awk 'BEGIN { while (1) a[i++] = \"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\" }'",
        Killed,
    ),
    (
        "bash",
        "sed of what has no lines",
        "exec sed s/a/b/ /dev/zero",
        Killed,
    ),
    (
        "node",
        "buffers",
        "const x = []; while (true) x.push(Buffer.alloc(4 << 20, 1))",
        Killed,
    ),
    (
        "node",
        "buffers between timers",
        "
const x = []; setInterval(() => x.push(Buffer.alloc(2 << 20, 1)), 1)",
        Killed,
    ),
    (
        "node",
        "typed arrays",
        "const x = []; while (true) x.push(new Float64Array(1 << 18).fill(1))",
        Killed,
    ),
    // Slow.
    (
        "python",
        "2 MiB every 5 ms",
        "
import time
x = []
while True: x.append(b'x' * (2 << 20)); time.sleep(0.005)",
        Killed,
    ),
    (
        "python",
        "16 MiB every 50 ms",
        "
import time
x = []
while True: x.append(b'x' * (16 << 20)); time.sleep(0.05)",
        Killed,
    ),
    (
        "python",
        "small objects",
        "x = [(i, str(i)) for i in range(10 ** 8)]",
        Killed,
    ),
    (
        "python",
        "a dictionary",
        "x = {i: i * 1.5 for i in range(10 ** 8)}",
        Killed,
    ),
    (
        "python",
        "a string that doubles",
        "x = 'x'\nwhile True: x += x",
        Killed,
    ),
    // Filled by the kernel: in gVisor by its sentry, not by the program's own page faults.
    (
        "python",
        "a file that is read",
        "
x = []
while True:
    with open('big', 'rb', buffering=0) as f:
        while (d := f.read(4 << 20)): x.append(d)",
        Killed,
    ),
    (
        "python",
        "random bytes",
        "
import os
x = []
while True: x.append(os.urandom(4 << 20))",
        Killed,
    ),
    (
        "python",
        "the output of a program",
        "
import subprocess
x = subprocess.run(['head', '-c', '800M', '/dev/zero'], capture_output=True)",
        Killed,
    ),
    (
        "python",
        "what is unpacked",
        "
import zlib
z = zlib.compress(bytes(64 << 20))
x = [zlib.decompress(z) for _ in range(20)]",
        Killed,
    ),
    // Shared.
    (
        "python",
        "shared anonymous memory",
        "
import mmap
m = mmap.mmap(-1, 1 << 30)
for i in range(0, 1 << 30, 4096): m[i] = 1",
        Killed,
    ),
    (
        "python",
        "a memory file, mapped",
        "
import os, mmap
f = os.memfd_create('x'); os.ftruncate(f, 1 << 30); m = mmap.mmap(f, 1 << 30)
for i in range(0, 1 << 30, 4096): m[i] = 1",
        Killed,
    ),
    (
        "python",
        "a memory file, written",
        "
import os
f = os.memfd_create('x')
while True: os.write(f, b'x' * (1 << 20))",
        Killed,
    ),
    (
        "python",
        "beside full shared memory",
        "
f = open('/dev/shm/y', 'wb'); f.write(b'x' * (50 << 20)); f.flush()
x = []
while True: x.append(b'x' * (1 << 20))",
        Killed,
    ),
    (
        "bash",
        "with what it left there",
        "rm /dev/shm/y && ls /dev/shm",
        Completes,
    ),
    // Threads and processes.
    (
        "python",
        "8 threads",
        "
import threading
x = []
def fill():
    while True: x.append(b'x' * (1 << 20))
for _ in range(8): threading.Thread(target=fill).start()",
        Killed,
    ),
    (
        "python",
        "a child",
        "
import os
pid = os.fork()
if pid == 0:
    x = []
    while True: x.append(b'x' * (1 << 20))
os._exit(128 + (os.waitpid(pid, 0)[1] & 127))",
        Killed,
    ),
    (
        "python",
        "a child that is not the command",
        "
import os
pid = os.fork()
if pid == 0:
    x = []
    while True: x.append(b'x' * (1 << 20))
os.waitpid(pid, 0); print('done')",
        ChildKilled,
    ),
    (
        "python",
        "16 children of 30 MiB",
        "
import os, time
pids = []
for _ in range(16):
    pid = os.fork()
    if pid == 0: x = b'x' * (30 << 20); time.sleep(1); os._exit(0)
    pids.append(pid)
print([os.waitpid(pid, 0)[1] for pid in pids])",
        ChildKilled,
    ),
    (
        "python",
        "4 children at once",
        "
import os
for _ in range(4):
    if os.fork() == 0:
        x = []
        while True: x.append(b'x' * (1 << 20))
while True:
    try: os.wait()
    except ChildProcessError: break",
        ChildKilled,
    ),
    (
        "python",
        "copies on write",
        "
import os
x = bytearray(b'x' * (40 << 20))
pids = []
for _ in range(6):
    pid = os.fork()
    if pid == 0:
        for i in range(0, len(x), 4096): x[i] = 1
        os.read(0, 1); __import__('time').sleep(0.5); os._exit(0)
    pids.append(pid)
for pid in pids: os.waitpid(pid, 0)",
        AnyKilled,
    ),
    (
        "bash",
        "a subshell",
        "(exec python3 -c 'x = b\"x\" * (1 << 30)'); echo went on",
        ChildKilled,
    ),
    (
        "bash",
        "one after another",
        "
for i in 1 2 3; do python3 -c 'x = b\"x\" * (1 << 30)'; done; true",
        ChildKilled,
    ),
];

/// A program for what interpreters cannot do.
const C: &str = r#"
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
static const size_t MANY = (size_t)2 << 30;
static char *map(size_t bytes, int flags) {
    char *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    return at == MAP_FAILED ? (exit(1), at) : at;
}
static void *thread(void *x) { memset(map(MANY, 0), 1, MANY); return x; }
int main(int argc, char **argv) {
    const char *how = argv[1];
    if (!strcmp(how, "memset")) memset(map(MANY, 0), 1, MANY);
    if (!strcmp(how, "populate")) for (;;) map(16 << 20, MAP_POPULATE);
    if (!strcmp(how, "malloc")) for (;;) { char *p = malloc(3000); if (!p) return 1; memset(p, 1, 3000); }
    if (!strcmp(how, "brk")) for (;;) { char *p = sbrk(1 << 20); if (p == (void *)-1) return 1; memset(p, 1, 1 << 20); }
    if (!strcmp(how, "sparse")) { char *p = map(MANY, 0); for (size_t i = 0; i < MANY; i += 8192) p[i] = 1; }
    if (!strcmp(how, "threads")) {
        pthread_t t[8];
        for (int i = 0; i < 8; i++) pthread_create(&t[i], 0, thread, 0);
        for (int i = 0; i < 8; i++) pthread_join(t[i], 0);
    }
    if (!strcmp(how, "forks")) {
        int status, killed = 0;
        for (int i = 0; i < 8; i++) if (!fork()) { memset(map(MANY, 0), 1, MANY); _exit(0); }
        while (wait(&status) > 0) killed |= WIFSIGNALED(status) && WTERMSIG(status) == 9;
        return killed ? 137 : 1;
    }
    return 0;
}
"#;

#[test]
fn bombs_kill_processes_and_not_the_session_on_native() {
    bombs_kill_processes_and_not_the_session("native");
}

#[test]
fn bombs_kill_processes_and_not_the_session_on_gvisor() {
    bombs_kill_processes_and_not_the_session("gvisor");
}

fn bombs_kill_processes_and_not_the_session(runtime: &str) {
    let server = Server::start_with(&["--default-runtime", runtime]);
    let (session, neighbour) = (
        server.session_with(&["--memory", MEMORY]),
        server.session_with(&["--memory", MEMORY]),
    );
    // It holds most of its own memory all the time.
    let hold = "
import os, time
x = bytearray(70 << 20)
for i in range(0, len(x), 4096): x[i] = 1
open('pid', 'w').write(str(os.getpid()))
while True:
    x[1] ^= 1; time.sleep(0.1)";
    let held = start_in_background(&neighbour, &["--lang", "python"], hold);
    let put = |path: &str, data: &[u8]| {
        let written = server.k8e_with(&["sandbox", "write", &session.id, path], data);
        assert_eq!(written.code, 0, "{}", written.all());
    };
    put("bomb", &compiled());
    assert_eq!(session.sh("chmod +x bomb; echo mine > kept").code, 0);
    let alive = |name: &str| {
        // Memory of a killed process is freed a moment later; a command that starts in it can be killed as well.
        until(&format!("it answers after {name}"), || {
            session.sh("cat kept; echo alive").out() == "mine\nalive\n"
        });
    };
    let mut wrong = Vec::new();
    for (language, name, code, end) in BOMBS {
        let flags = ["--lang", language, "--timeout", "60"];
        let ran = session.run_json(&flags, code);
        if let Err(why) = check(end, &ran) {
            wrong.push(format!("{name}: {why}: {ran}"));
        }
        alive(name);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));

    // What outlives its call, and what has a terminal.
    let bomb = "x = []\nwhile True: x.append(b'x' * (1 << 20))";
    for _ in 0..2 {
        let run = start_in_background(&session, &["--lang", "python"], bomb);
        let ended = over(&server, &run);
        assert_eq!(ended["status"], "oom_killed", "{ended}");
        alive("a background run");
    }
    let exited = in_terminal(&server, &session, &["python3", "-c", bomb]);
    assert_eq!(exited.exit_code, 137, "{exited:?}");
    alive("a terminal");
    // A daemon whose command has ended.
    let ran = session.run_json(
        &[],
        "setsid tail /dev/zero >/dev/null 2>&1 & sleep 0.1; echo ok",
    );
    assert_eq!(ran["status"], "completed", "{ran}");
    until("the daemon is killed", || {
        session.sh("pgrep -x tail").out().is_empty()
    });
    // A run that is no bomb goes on beside one.
    let quiet = start_in_background(&session, &[], "sleep 3; echo done");
    let ran = session.run_json(&["--lang", "python"], bomb);
    assert_eq!(ran["status"], "oom_killed", "{ran}");
    let ended = over(&server, &quiet);
    assert_eq!(
        (&ended["status"], &ended["stdout"]),
        (&"completed".into(), &"done\n".into()),
        "{ended}"
    );

    let kills = |session: &Session<'_>| {
        let got = server.k8e(&["sandbox", "get", &session.id]).json();
        assert_eq!(got["phase"], "active", "{got}");
        got["oom_kills"].as_u64().unwrap()
    };
    assert!(kills(&session) >= 40, "{}", kills(&session));
    assert_eq!(kills(&neighbour), 0);
    let same = neighbour.sh("kill -0 $(cat pid) && echo alive");
    assert_eq!(same.out(), "alive\n", "{}", same.all());
    let still = server.k8e(&["sandbox", "poll", &held]).json();
    assert_eq!(still["status"], "running", "{still}");
    session.destroy();
    neighbour.destroy();
    server.assert_traces(0);
}

/// Whether a run ended as it must.
fn check(end: End, ran: &Value) -> Result<(), &'static str> {
    let memory =
        (ran["limits_hit"].as_array()).is_some_and(|hit| hit.iter().any(|limit| limit == "memory"));
    match end {
        Killed if ran["status"] != "oom_killed" => Err("not oom_killed"),
        Killed if ran["exit_code"] != 137 => Err("another exit code than 137"),
        Killed | ChildKilled | AnyKilled if !memory => Err("limits_hit is without memory"),
        ChildKilled | Completes if ran["status"] != "completed" => Err("not completed"),
        Completes if ran["exit_code"] != 0 => Err("it failed"),
        Completes if memory => Err("killed for memory"),
        Killed | ChildKilled | AnyKilled | Completes => Ok(()),
    }
}

#[test]
fn the_process_limit_is_told_on_both() {
    for runtime in ["native", "gvisor"] {
        let server = Server::start_with(&["--default-runtime", runtime]);
        let session = server.session_with(&["--pids", "40"]);
        let hit = |flags: &[&str], code: &str| session.run_json(flags, code)["limits_hit"].clone();
        let none = hit(&[], "for i in $(seq 10); do sleep 0.1 & done; wait");
        assert!(none.is_null(), "{runtime}: {none}");
        // gVisor's guest counts when output arrives: a program that ends its processes at once may be missed.
        let forks = "
import os, time
made = []
try:
    while True:
        pid = os.fork()
        if pid == 0: time.sleep(20); os._exit(0)
        made.append(pid)
except BlockingIOError as e: print(e, flush=True)
time.sleep(2)
for pid in made: os.kill(pid, 9); os.waitpid(pid, 0)";
        let threads = "
import threading, time
stop = threading.Event()
try:
    while True: threading.Thread(target=stop.wait).start()
except RuntimeError as e: print(e, flush=True)
time.sleep(2)
stop.set()";
        for code in [forks, threads] {
            let pids = hit(&["--lang", "python"], code);
            assert_eq!(pids, serde_json::json!(["pids"]), "{runtime}: {code}");
        }
        let bomb = ":(){ :|:& };:; sleep 2; exit 0";
        let pids = hit(&["--timeout", "20"], bomb);
        assert_eq!(pids, serde_json::json!(["pids"]), "{runtime}");
    }
}

fn start_in_background(session: &Session<'_>, flags: &[&str], code: &str) -> String {
    let args = [
        "sandbox",
        "run",
        "--background",
        "--session-id",
        &session.id,
    ];
    let ran = session.server.k8e(&[&args, flags, &[code]].concat());
    assert_eq!(ran.code, 0, "{}", ran.all());
    ran.json()["run_id"].as_str().unwrap().to_owned()
}

/// How a background run ended.
fn over(server: &Server, run: &str) -> Value {
    let poll = || server.k8e(&["sandbox", "poll", run]).json();
    until("a background run is over", || poll()["status"] != "running");
    poll()
}

fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < deadline, "never happens: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a command on a terminal to its end.
fn in_terminal(server: &Server, session: &Session<'_>, argv: &[&str]) -> v1::TerminalExited {
    let work = async {
        let endpoint = Endpoint::Unix(server.socket());
        let mut client = Client::connect(&endpoint).await.unwrap();
        let request = v1::CreateTerminalRequest {
            session_id: session.id.clone(),
            argv: argv.iter().map(|arg| arg.to_string().into()).collect(),
            rows: 24,
            cols: 80,
            ..Default::default()
        };
        let terminal_id = client
            .create_terminal(request)
            .await
            .unwrap()
            .into_inner()
            .terminal_id;
        let request = v1::AttachTerminalRequest { terminal_id };
        let mut events = client.attach_terminal(request).await.unwrap().into_inner();
        loop {
            let event = events.message().await.unwrap().expect("an end");
            if let Some(Event::Exited(exited)) = event.event {
                return exited;
            }
        }
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let within = async { tokio::time::timeout(SOON, work).await };
    runtime.block_on(within).expect("the terminal hangs")
}

/// The program of [`C`], which the C compiler makes that links our own programs.
fn compiled() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bomb");
    let mut cc = Command::new("cc")
        .args(["-x", "c", "-O1", "-w", "-pthread", "-o"])
        .arg(&path)
        .arg("-")
        .stdin(Stdio::piped())
        .spawn()
        .expect("this test needs a C compiler: cc");
    let mut source = cc.stdin.take().unwrap();
    source.write_all(C.as_bytes()).unwrap();
    drop(source);
    assert!(cc.wait().unwrap().success(), "cc failed");
    std::fs::read(path).unwrap()
}
