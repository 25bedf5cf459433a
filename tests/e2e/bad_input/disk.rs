//! A full disk and a read-only one.

use super::refused;
use k8e_e2e::{Ran, Server, binary, passable_tempdir};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A small file system of its own.
struct Disk(tempfile::TempDir);

// === impl Disk ===

impl Disk {
    fn new(megabytes: u32) -> Self {
        let dir = passable_tempdir("k8e-disk-");
        let disk = Self(dir);
        disk.mount(&format!("size={megabytes}m"));
        disk
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// A name that no other test has: its loop devices are found by it.
    fn data(&self) -> PathBuf {
        self.path().join("data-on-a-small-disk")
    }

    fn mount(&self, options: &str) {
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(self.path());
        assert!(
            mount.status().expect("mount runs").success(),
            "mount {options}"
        );
    }

    /// Writes until there is no room for a byte.
    fn fill(&self) {
        let mut file = std::fs::File::create(self.path().join("filler")).expect("a file");
        for size in [1 << 20, 4096, 1] {
            while file.write_all(&vec![7; size]).is_ok() {}
        }
    }

    fn free(&self) {
        std::fs::remove_file(self.path().join("filler")).expect("the filler");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily: a sandbox that was just removed may still have it in a namespace.
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

#[test]
fn a_disk_that_is_full() {
    let disk = Disk::new(400);
    let mut server = Server::start_in(&disk.data());
    let session = server.session();
    assert_eq!(session.sh("echo kept > f").code, 0);
    disk.fill();

    for _ in 0..3 {
        let ran = server.k8e(&["sandbox", "create", "--session-id", "late"]);
        refused(&ran, &["disk", "free some space"]);
        assert_eq!(ran.json()["detail"], "exhausted", "{}", ran.all());
        refused(
            &server.k8e(&["sandbox", "run", "--fresh", "true"]),
            &["free some space"],
        );
    }
    assert_eq!(session.sh("cat f; echo fine").out(), "kept\nfine\n");
    assert_eq!(
        server.k8e(&["sandbox", "read", &session.id, "f"]).json()["content"],
        "kept\n"
    );
    server.assert_traces(1);
    assert_eq!(server.session_ids(), [session.id.as_str()]);

    let fresh = server_says(&disk.path().join("new"));
    assert_eq!(fresh.code, 1, "{}", fresh.all());
    for word in ["free some space", "--data-dir", "No space left"] {
        assert!(fresh.err().contains(word), "no {word:?}: {}", fresh.all());
    }

    disk.free();
    let late = server.session_with(&["--session-id", "late"]);
    assert_eq!(late.sh("echo ok").out(), "ok\n");
    server.assert_traces(2);

    // A server that has been there starts on a full disk too, and finds what lives.
    disk.fill();
    let id = session.id.clone();
    server.kill();
    server.restart();
    for id in [id.as_str(), "late"] {
        let ran = server.k8e(&["sandbox", "run", "--raw", "--session-id", id, "echo ok"]);
        assert_eq!(ran.out(), "ok\n", "{}", ran.all());
    }
    refused(&server.k8e(&["sandbox", "create"]), &["free some space"]);
    server.assert_traces(2);
    // Ending a session is what frees space.
    let ended = server.k8e(&["sandbox", "destroy", &id]);
    assert_eq!(ended.code, 0, "{}", ended.all());
    server.assert_traces(1);
    disk.free();
    assert_eq!(server.session_ids(), ["late"]);
}

#[test]
fn a_data_directory_that_is_read_only() {
    let disk = Disk::new(64);
    // One that is there already, and one that would have to be made.
    std::fs::create_dir(disk.data()).unwrap();
    disk.mount("ro,remount,size=64m");
    for dir in [disk.data(), disk.path().join("new"), disk.path().to_owned()] {
        let ran = server_says(&dir);
        assert_eq!(ran.code, 1, "{}", ran.all());
        for word in [
            dir.to_str().unwrap(),
            "--data-dir",
            "Read-only",
            "root can write",
        ] {
            assert!(ran.err().contains(word), "no {word:?}: {}", ran.all());
        }
        let auto = ran_of(
            Command::new(binary())
                .args(["sandbox", "run", "true"])
                .env("K8E_DATA_DIR", &dir)
                .env_remove("K8E_SANDBOX_ENDPOINT")
                .env_remove("K8E_NO_AUTOSTART"),
        );
        assert_eq!(auto.code, 2, "{}", auto.all());
        for word in [dir.to_str().unwrap(), "--data-dir", "Read-only"] {
            let error = auto.json()["error"].to_string();
            assert!(error.contains(word), "no {word:?}: {}", auto.all());
        }
    }
}

/// What a server that should not start says.
fn server_says(data: &Path) -> Ran {
    let mut command = Command::new("timeout");
    command
        .arg("15")
        .arg(binary())
        .args(["server", "--listen", "none", "--data-dir"])
        .arg(data);
    ran_of(&mut command)
}

fn ran_of(command: &mut Command) -> Ran {
    let output = command.stdin(Stdio::null()).output().expect("k8e runs");
    Ran {
        code: output.status.code().expect("an exit code"),
        stdout: output.stdout,
        stderr: output.stderr,
    }
}
