//! A guest that breaks the rules, end to end: the socket of a live sandbox is taken over.

use super::refused;
use k8e_e2e::{Ran, Server, Session};
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// By then the server has made the connection for the next call.
const CONNECTED_AFTER: Duration = Duration::from_millis(200);

/// Sits on a sandbox's socket. Dropping it hangs up on everybody and puts the real guest back.
struct FakeGuest {
    socket: PathBuf,
    real: PathBuf,
    taken: Arc<Mutex<Vec<UnixStream>>>,
}

// === impl FakeGuest ===

impl FakeGuest {
    fn instead_of(session: &Session<'_>, socket: &Path, answer: fn(&mut UnixStream)) -> Self {
        std::thread::sleep(CONNECTED_AFTER);
        let real = socket.with_extension("real");
        std::fs::rename(socket, &real).expect("the guest's socket");
        let listener = UnixListener::bind(socket).expect("a socket in its place");
        // The server is not root.
        std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o666)).expect("ours");
        let taken: Arc<Mutex<Vec<UnixStream>>> = Arc::default();
        let taken_here = Arc::clone(&taken);
        // Ends with the test: it holds nothing but descriptors.
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let copy = stream.try_clone().expect("a descriptor");
                taken_here.lock().expect("no panic").push(copy);
                std::thread::spawn(move || {
                    answer(&mut stream);
                    let _ = stream.shutdown(Shutdown::Both);
                });
            }
        });
        // The last that the real guest hears: on the connection that was made before.
        session.server.k8e(&["sandbox", "ps", &session.id]);
        Self {
            socket: socket.to_owned(),
            real,
            taken,
        }
    }
}

impl Drop for FakeGuest {
    fn drop(&mut self) {
        std::fs::rename(&self.real, &self.socket).expect("the real guest comes back");
        for stream in self.taken.lock().expect("no panic").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// The socket of the only sandbox of a server.
fn only_socket(server: &Server) -> PathBuf {
    let dir = server.data_dir().join("native/sandboxes");
    let mut entries = std::fs::read_dir(dir).expect("sandboxes");
    let only = entries.next().expect("one sandbox").expect("an entry");
    assert!(entries.next().is_none());
    only.path().join("guest.sock")
}

/// Takes the request first: answering before would be another fault.
fn request(stream: &mut UnixStream) {
    let mut prefix = [0; 4];
    if stream.read_exact(&mut prefix).is_ok() {
        let mut frame = vec![0; u32::from_be_bytes(prefix) as usize];
        let _ = stream.read_exact(&mut frame);
    }
}

fn garbage(stream: &mut UnixStream) {
    request(stream);
    // A frame of a plausible length that is no message.
    let _ = stream.write_all(&[&[0, 0, 0, 64][..], &[0xff; 64]].concat());
}

fn huge(stream: &mut UnixStream) {
    request(stream);
    let _ = stream.write_all(&[0xff; 1 << 16]);
}

fn closes(_: &mut UnixStream) {}

fn half(stream: &mut UnixStream) {
    request(stream);
    let _ = stream.write_all(&[0, 0, 1, 0, 1, 2, 3]);
}

/// Empty frames without end.
fn nothing_for_ever(stream: &mut UnixStream) {
    request(stream);
    while stream.write_all(&[0; 4096]).is_ok() {}
}

fn silence(stream: &mut UnixStream) {
    let mut sink = [0; 4096];
    // Ends when the other side gives up.
    while stream.read(&mut sink).is_ok_and(|read| read > 0) {}
}

/// One of each kind of call.
fn calls(session: &Session<'_>) -> Vec<Ran> {
    let id = session.id.as_str();
    let commands = [
        vec![
            "sandbox",
            "run",
            "--timeout",
            "1",
            "--session-id",
            id,
            "true",
        ],
        vec!["sandbox", "read", id, "f"],
        vec!["sandbox", "write", id, "f"],
        vec!["sandbox", "list", id],
        vec!["sandbox", "stat", id, "f"],
        vec!["sandbox", "ps", id],
    ];
    std::thread::scope(|scope| {
        let threads: Vec<_> = commands
            .iter()
            .map(|args| scope.spawn(|| session.server.k8e(args)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a command ends"))
            .collect()
    })
}

#[test]
fn a_guest_that_sends_garbage() {
    let server = Server::start();
    let victim = server.session();
    let socket = only_socket(&server);
    let neighbour = server.session();
    assert_eq!(victim.sh("echo kept > f").code, 0);
    for (name, answer) in [
        ("garbage", garbage as fn(&mut UnixStream)),
        ("huge", huge),
        ("closes", closes),
        ("half", half),
        ("nothing for ever", nothing_for_ever),
    ] {
        let fake = FakeGuest::instead_of(&victim, &socket, answer);
        let start = Instant::now();
        for ran in calls(&victim) {
            refused(
                &ran,
                &["agent misbehaved", "destroy session", "make a new one"],
            );
            assert_eq!(ran.json()["detail"], "unavailable", "{name}: {}", ran.all());
        }
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{name}: {:?}",
            start.elapsed()
        );
        assert_eq!(neighbour.sh("echo fine").out(), "fine\n", "{name}");
        drop(fake);
        assert_eq!(
            victim.sh("cat f").out(),
            "kept\n",
            "{name}: the real guest is back"
        );
    }
    let fake = FakeGuest::instead_of(&victim, &socket, garbage);
    victim.destroy();
    assert!(!socket.exists(), "destroying does not ask the guest");
    std::mem::forget(fake);
    server.assert_traces(1);
    neighbour.destroy();
    server.assert_traces(0);
}

#[test]
fn a_silent_guest() {
    let server = Server::start();
    let victim = server.session();
    let socket = only_socket(&server);
    let neighbour = server.session();
    let fake = FakeGuest::instead_of(&victim, &socket, silence);
    let start = Instant::now();
    for ran in calls(&victim) {
        refused(&ran, &["agent misbehaved", "in time", "make a new one"]);
    }
    // A guest has 30 s to answer; see the engine.
    assert!(
        start.elapsed() < Duration::from_secs(45),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(neighbour.sh("echo fine").out(), "fine\n");
    drop(fake);
    assert_eq!(victim.sh("echo back").out(), "back\n");
    victim.destroy();
    server.assert_traces(1);
}
