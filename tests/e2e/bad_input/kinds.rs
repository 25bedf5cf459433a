//! File calls on what is not a file: directories, pipes, devices, sockets.

use super::refused;
use k8e_e2e::{Server, Session};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn a_file_call_on_a_directory() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(
        session
            .sh("mkdir -p d/sub; echo kept > d/f; echo x > file")
            .code,
        0
    );
    refused(
        &server.k8e(&["sandbox", "read", &session.id, "d"]),
        &["is a directory", "/workspace/d"],
    );
    refused(
        &server.k8e(&["sandbox", "read", &session.id, "/workspace"]),
        &["is a directory"],
    );
    for mode in ["w", "a"] {
        let args = ["sandbox", "write", "--mode", mode, &session.id, "d"];
        refused(&server.k8e_with(&args, b"x"), &["is a directory"]);
    }
    refused(
        &server.k8e(&["sandbox", "rm", &session.id, "d"]),
        &["directory", "recursive"],
    );
    refused(
        &server.k8e(&["sandbox", "mkdir", &session.id, "d"]),
        &["exists"],
    );
    refused(
        &server.k8e(&["sandbox", "mv", &session.id, "file", "d"]),
        &["directory"],
    );
    refused(
        &server.k8e(&["sandbox", "mv", &session.id, "d", "d/sub/x"]),
        &["d"],
    );
    // The other way round.
    refused(
        &server.k8e(&["sandbox", "list", &session.id, "file"]),
        &["not a directory"],
    );
    refused(
        &server.k8e(&["sandbox", "read", &session.id, "file/below"]),
        &["not a directory"],
    );
    refused(
        &server.k8e(&["sandbox", "mkdir", "-p", &session.id, "file/below"]),
        &["not a directory"],
    );
    // And with the workspace itself.
    refused(
        &server.k8e(&["sandbox", "rm", "-r", &session.id, "/workspace"]),
        &["/workspace"],
    );
    refused(
        &server.k8e(&["sandbox", "mv", &session.id, "/workspace", "x"]),
        &["/workspace"],
    );
    refused(
        &server.k8e(&["sandbox", "read", &session.id, "missing"]),
        &["missing", "No such file"],
    );
    assert_eq!(
        session.sh("find . | sort; cat d/f").out(),
        ".\n./d\n./d/f\n./d/sub\n./file\nkept\n"
    );
}

#[test]
fn a_file_call_on_a_pipe_a_device_or_a_socket() {
    let server = Server::start();
    let session = server.session();
    let made = session
        .py("import os, socket\nos.mkfifo('pipe')\nsocket.socket(socket.AF_UNIX).bind('socket')");
    assert_eq!(made.code, 0, "{}", made.all());
    for path in ["pipe", "socket"] {
        neither_reads_nor_writes(&session, path);
    }
    // No sandbox can make a device, so one is put there from outside; a link to one leads out.
    let made =
        session.sh("mknod zero c 1 5; echo kinds > marker; ln -s /dev/zero link; sleep 60 &");
    assert!(made.err().contains("mknod"), "{}", made.all());
    device_from_outside("kinds");
    assert_eq!(session.sh("test -c zero").code, 0);
    neither_reads_nor_writes(&session, "zero");
    refused(
        &server.k8e(&["sandbox", "read", &session.id, "link"]),
        &["leads out of"],
    );
    let stat = server.k8e(&["sandbox", "stat", &session.id, "pipe"]).json();
    assert_eq!(stat["type"], "other", "{stat}");
    for path in ["pipe", "socket"] {
        assert_eq!(server.k8e(&["sandbox", "rm", &session.id, path]).code, 0);
    }
}

fn neither_reads_nor_writes(session: &Session<'_>, path: &str) {
    let start = Instant::now();
    let words = &["neither a regular file nor a directory", path];
    let server = session.server;
    refused(&server.k8e(&["sandbox", "read", &session.id, path]), words);
    for mode in ["w", "a"] {
        let args = ["sandbox", "write", "--mode", mode, &session.id, path];
        refused(&server.k8e_with(&args, b"x"), words);
    }
    refused(
        &server.k8e(&["sandbox", "list", &session.id, path]),
        &["not a directory"],
    );
    assert!(start.elapsed() < Duration::from_secs(10), "{path} blocked");
}

/// Makes the device `zero` in the workspace of the sandbox whose `marker` says so.
fn device_from_outside(marker: &str) {
    let workspaces = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .map(|process| process.path().join("root/workspace"));
    let marked = |workspace: &PathBuf| {
        let said = std::fs::read_to_string(workspace.join("marker")).unwrap_or_default();
        said.trim() == marker
    };
    let workspace = workspaces.into_iter().find(marked).expect("the sandbox");
    let made = Command::new("mknod")
        .arg(workspace.join("zero"))
        .args(["c", "1", "5"])
        .status();
    assert!(made.unwrap().success());
}
