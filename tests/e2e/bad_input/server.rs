//! Servers that get in each other's way, and what dead ones leave behind.

use k8e_e2e::{Server, binary, passable_tempdir};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn second(data: &Path, flags: &[&str]) -> Output {
    Command::new("timeout")
        .arg("15")
        .arg(binary())
        .args(["server", "--listen", "none", "--data-dir"])
        .arg(data)
        .args(flags)
        .stdin(Stdio::null())
        .output()
        .expect("k8e runs")
}

/// Told at once who is first, and the first goes on.
fn is_refused(server: &Server, data: &Path, flags: &[&str], within: Duration) {
    let start = Instant::now();
    let output = second(data, flags);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    for word in [
        &format!("pid {}", server.pid()),
        "another k8e server",
        "stop it or choose another --data-dir",
    ] {
        assert!(said.contains(word), "no {word:?}: {said}");
    }
    assert!(start.elapsed() < within, "{:?}", start.elapsed());
}

#[test]
fn a_second_server_on_the_same_directory() {
    let server = Server::start();
    let session = server.session();
    let data = server.data_dir();
    let at_once = Duration::from_secs(5);
    is_refused(&server, &data, &[], at_once);
    let link = tempfile::tempdir().unwrap();
    let link = link.path().join("link");
    std::os::unix::fs::symlink(&data, &link).unwrap();
    // By another name it is the same directory, which could lead elsewhere by the next start.
    let said = second(&link, &[]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("symbolic link"), "{said}");
    // With a socket elsewhere it cannot know at once that the first answers, but knows in the end.
    let elsewhere = data.join("elsewhere.sock");
    is_refused(
        &server,
        &data,
        &["--socket", elsewhere.to_str().unwrap()],
        Duration::from_secs(14),
    );
    assert_eq!(session.sh("echo fine").out(), "fine\n");
    assert_eq!(server.session().sh("echo fine").out(), "fine\n");
    server.assert_traces(2);
}

#[test]
fn what_a_dead_server_left() {
    let dir = passable_tempdir("k8e-left-");
    let data = dir.path().join("data");
    std::fs::create_dir(&data).unwrap();
    for (lock, socket) in [
        ("1\n", "socket"),
        ("not a number", "file"),
        ("", "half-made"),
    ] {
        std::fs::write(data.join("lock"), lock).unwrap();
        let path = data.join("k8e.sock");
        match socket {
            "socket" => drop(UnixListener::bind(&path).unwrap()),
            "file" => std::fs::write(&path, "not a socket").unwrap(),
            _ => drop(UnixListener::bind(data.join("k8e.sock.new")).unwrap()),
        }
        let mut server = Server::start_in(&data);
        let session = server.session();
        assert_eq!(session.sh("echo fine").out(), "fine\n", "{socket}");
        // A killed one leaves both, and the next starts all the same.
        server.kill();
        assert!(data.join("lock").exists() && path.exists());
        server.restart();
        let ids = server.session_ids();
        assert_eq!(ids.len(), 1);
        let ran = server.k8e(&[
            "sandbox",
            "run",
            "--raw",
            "--session-id",
            &ids[0],
            "echo fine",
        ]);
        assert_eq!(ran.out(), "fine\n", "{}", ran.all());
        assert_eq!(server.k8e(&["sandbox", "destroy", &ids[0]]).code, 0);
        server.assert_traces(0);
        server.stop();
        assert!(
            !path.exists(),
            "a server that stops in order takes its socket along"
        );
    }
}

#[test]
fn a_data_directory_deeper_than_a_sockets_address() {
    let dir = passable_tempdir("k8e-deep-");
    let data = dir
        .path()
        .join("deep-".repeat(20))
        .join("deeper-".repeat(20))
        .join("data");
    let server = Server::start_in(&data);
    assert!(server.socket().as_os_str().len() > 200);
    let session = server.session();
    assert_eq!(session.sh("echo fine > f; cat f").out(), "fine\n");
    let read = server.k8e(&["sandbox", "read", &session.id, "f"]);
    assert_eq!(read.json()["content"], "fine\n", "{}", read.all());
    is_refused(&server, &data, &[], Duration::from_secs(5));
    session.destroy();
    server.assert_traces(0);
}
