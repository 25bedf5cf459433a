//! Paused sessions whose memory is on disk (gVisor): no process is left, and all of it goes on after resume.

use k8e_e2e::{Server, Session};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Nothing here takes longer, on a machine that runs other tests as well.
const SOON: Duration = Duration::from_secs(90);

/// Holds what is hard to save: variables, a thread, an unlinked file, a pipe, a pseudo-terminal with a shell, a listener,
/// a Unix socket on disk. Each connection is answered with all of it.
const HOLDER: &str = r#"
import os, pty, secrets, socket, threading, time
nonce = secrets.token_hex(8)
count = 0
def counting():
    global count
    while True:
        count += 1
        time.sleep(0.01)
threading.Thread(target=counting, daemon=True).start()
held = open("held", "w+"); os.unlink("held"); held.write(nonce); held.flush()
r, w = os.pipe(); os.write(w, nonce.encode())
child, shell = pty.fork()
if child == 0:
    os.execv("/bin/sh", ["sh"])
os.write(shell, b"kept=" + nonce.encode() + b"\n")
local = socket.socket(socket.AF_UNIX); local.bind("/workspace/local.sock"); local.listen()
server = socket.socket(); server.bind(("127.0.0.1", 4000)); server.listen()
open("ready", "w").close()
while True:
    client, _ = server.accept()
    held.seek(0)
    pipe = os.read(r, 100); os.write(w, pipe)
    os.write(shell, b"echo [$kept]\n")
    seen = b""
    while b"[" + nonce.encode() + b"]" not in seen:
        seen += os.read(shell, 1000)
    near = socket.socket(socket.AF_UNIX); near.connect("/workspace/local.sock"); near.close(); local.accept()[0].close()
    client.sendall(f"{nonce} {held.read()} {pipe.decode()} {os.getpid()} {count}".encode())
    client.close()
"#;

/// Asks the holder for its state.
const ASK: &str = "import socket; s = socket.create_connection(('127.0.0.1', 4000)); print(b''.join(iter(lambda: s.recv(100), b'')).decode())";

/// What the holder answered: all but the counter, and the counter.
pub(super) type State = (String, u64);

pub(super) fn newest_runsc() -> String {
    let tools = std::env::var_os("K8E_TOOLS_DIR").expect("`cargo xtask test` sets K8E_TOOLS_DIR");
    let path = PathBuf::from(tools).join("runsc/newest/runsc");
    assert!(path.is_file(), "`cargo xtask setup` builds {path:?}");
    path.to_string_lossy().into_owned()
}

pub(super) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn sandbox(server: &Server, words: &[&str]) -> serde_json::Value {
    let ran = server.k8e(&[&["sandbox"], words].concat());
    assert_eq!(ran.code, 0, "{}\n{}", ran.all(), server.log_text());
    ran.json()
}

/// A session in which the holder runs.
pub(super) fn holder(server: &Server) -> String {
    let id = server.session().id;
    let args = [
        "run",
        "--lang",
        "python",
        "--background",
        "--session-id",
        &id,
        HOLDER,
    ];
    sandbox(server, &args);
    let session = at(server, &id);
    until("the holder is ready", || {
        session.sh("test -e ready").code == 0
    });
    id
}

pub(super) fn at<'a>(server: &'a Server, id: &str) -> Session<'a> {
    let id = id.to_owned();
    Session { server, id }
}

pub(super) fn ask(server: &Server, id: &str) -> State {
    let ran = at(server, id).py(ASK);
    assert_eq!(ran.code, 0, "{}", ran.all());
    let text = ran.out();
    let (kept, count) = text.trim().rsplit_once(' ').expect("a state and a count");
    let [nonce, held, pipe, _pid] = kept.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{text}");
    };
    assert!(nonce == held && nonce == pipe, "{text}");
    (kept.to_owned(), count.parse().unwrap())
}

/// Waits until the session's events have a word so many times.
pub(super) fn reported(server: &Server, id: &str, word: &str, times: usize) {
    let count = || {
        server
            .k8e(&["sandbox", "events", id])
            .out()
            .matches(word)
            .count()
    };
    until(&format!("{word} is reported {times} times"), || {
        count() == times
    });
}

pub(super) fn live_sandboxes(server: &Server) -> usize {
    let dir = server.data_dir().join("gvisor/sandboxes");
    std::fs::read_dir(dir).map_or(0, Iterator::count)
}

pub(super) fn states(server: &Server) -> usize {
    let dir = server.data_dir().join("gvisor/states");
    std::fs::read_dir(dir).map_or(0, Iterator::count)
}

pub(super) fn start(flags: &[&str]) -> Server {
    Server::start_with(&[&["--default-runtime", "gvisor"], flags].concat())
}

#[test]
fn memory_is_on_disk_while_it_is_paused_and_all_of_it_goes_on() {
    let runsc = newest_runsc();
    let mut server = start(&["--runsc", &runsc]);
    let id = holder(&server);
    let (kept, mut count) = ask(&server, &id);
    for (cycle, restart) in [false, true, false].into_iter().enumerate() {
        sandbox(&server, &["pause", &id]);
        reported(&server, &id, "saved", cycle + 1);
        assert_eq!(live_sandboxes(&server), 0, "no process is left");
        assert_eq!(states(&server), 1);
        if restart {
            server.kill();
            server.restart();
        }
        sandbox(&server, &["resume", &id]);
        reported(&server, &id, "restored", cycle + 1);
        let (now, counted) = ask(&server, &id);
        assert_eq!(now, kept);
        assert!(counted > count, "{counted} > {count}");
        count = counted;
        assert_eq!(states(&server), 0, "nothing is kept of what was resumed");
    }
    // A saved session ends without a trace.
    sandbox(&server, &["pause", &id]);
    at(&server, &id).destroy();
    assert_eq!((live_sandboxes(&server), states(&server)), (0, 0));
}

#[test]
fn a_session_that_cannot_be_saved_is_frozen_and_says_why() {
    // Debian's runsc does not save unlinked files.
    let mut server = start(&[]);
    let id = holder(&server);
    let (kept, count) = ask(&server, &id);
    sandbox(&server, &["pause", &id]);
    reported(&server, &id, "\"memory\":\"kept\"", 1);
    assert_eq!((live_sandboxes(&server), states(&server)), (1, 0));
    server.kill();
    server.restart();
    sandbox(&server, &["resume", &id]);
    let (now, counted) = ask(&server, &id);
    assert!(
        now == kept && counted > count,
        "{now} {counted}, before {kept} {count}"
    );
}

#[test]
fn one_of_two_resumes_wins_and_an_open_stream_keeps_a_session_in_memory() {
    let runsc = newest_runsc();
    let server = start(&["--runsc", &runsc]);
    let id = holder(&server);
    let (kept, _) = ask(&server, &id);
    sandbox(&server, &["pause", &id]);
    reported(&server, &id, "saved", 1);
    let resumes = std::thread::scope(|scope| {
        let resume = || server.k8e(&["sandbox", "resume", &id]).code;
        let (one, other) = (scope.spawn(resume), scope.spawn(resume));
        [one.join().unwrap(), other.join().unwrap()]
    });
    assert_eq!(
        resumes.iter().filter(|code| **code == 0).count(),
        1,
        "{resumes:?}"
    );
    assert_eq!(ask(&server, &id).0, kept);
    // Somebody waits for a command.
    let mut waiting = server.command(&[
        "sandbox",
        "run",
        "--raw",
        "--session-id",
        &id,
        "touch on; sleep 600",
    ]);
    let mut waiting = waiting.spawn().unwrap();
    until("the command runs", || {
        at(&server, &id).sh("test -e on").code == 0
    });
    sandbox(&server, &["pause", &id]);
    reported(&server, &id, "calls are open", 1);
    assert_eq!(states(&server), 0);
    sandbox(&server, &["resume", &id]);
    assert_eq!(ask(&server, &id).0, kept);
    waiting.kill().unwrap();
    waiting.wait().unwrap();
}
