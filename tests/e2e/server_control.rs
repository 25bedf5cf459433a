//! `k8e server stop`, `status` and `restart`, and `k8e sandbox prune`.

use crate::identity::{cert_dir, key, ran, remote};
use k8e_e2e::{Ran, Server, binary, passable_tempdir};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs `k8e server …` on a data directory.
fn control(data: &Path, args: &[&str]) -> Ran {
    ran(Command::new(binary())
        .arg("server")
        .args(args)
        .arg("--data-dir")
        .arg(data)
        .env_remove("K8E_SANDBOX_ENDPOINT")
        .stdin(Stdio::null()))
}

/// Stops a server that is no child of the test.
struct Stopped<'a>(&'a Path);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        control(self.0, &["stop"]);
    }
}

#[test]
fn a_server_is_stopped_and_restarted_with_its_sessions() {
    let dir = passable_tempdir("k8e-control-");
    let data = dir.path().join("data");
    let none = control(&data, &["status"]);
    assert_eq!(
        (none.code, &none.json()["running"]),
        (1, &false.into()),
        "{}",
        none.all()
    );
    let _stopped = Stopped(&data);
    let mut server = Server::start_in(&data);
    let session = server.session().id;
    let run = |server: &Server, code: &str| {
        server.k8e(&["sandbox", "run", "--raw", "--session-id", &session, code])
    };
    assert_eq!(run(&server, "echo kept > f").code, 0);
    let background = [
        "sandbox",
        "run",
        "--background",
        "--session-id",
        &session,
        "sleep 1000",
    ];
    let background = server.k8e(&background).json()["run_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let is_running = |server: &Server| {
        server.k8e(&["sandbox", "poll", &background]).json()["status"] == "running"
    };

    let status = control(&data, &["status"]);
    let found = status.json();
    assert_eq!(status.code, 0, "{}", status.all());
    assert_eq!(found["pid"], server.pid());
    assert_eq!(found["autostarted"], false);
    assert_eq!(found["managed_by"], serde_json::Value::Null);
    assert_eq!(found["socket"], server.socket().to_str().unwrap());

    let restarted = control(&data, &["restart"]);
    assert_eq!(restarted.code, 0, "{}", restarted.all());
    let pid = restarted.json()["pid"].as_u64().unwrap();
    assert_ne!(pid, u64::from(server.pid()));
    assert_eq!(control(&data, &["status"]).json()["pid"], pid);
    // With the same flags: this one has another default than a server without flags.
    let status = server.k8e(&["sandbox", "status"]).json();
    assert_eq!(status["default_runtime"], "native", "{status}");
    assert_eq!(run(&server, "cat f").out(), "kept\n");
    assert!(is_running(&server));

    let stopped = control(&data, &["stop"]);
    assert_eq!(
        (stopped.code, &stopped.json()["pid"]),
        (0, &pid.into()),
        "{}",
        stopped.all()
    );
    assert_eq!(server.k8e(&["sandbox", "status"]).code, 2);
    let again = control(&data, &["stop"]);
    let want = serde_json::json!({ "ok": true, "running": false });
    assert_eq!((again.code, again.json()), (0, want), "{}", again.all());
    let nothing = control(&data, &["restart"]);
    assert_eq!(nothing.code, 1, "{}", nothing.all());
    assert!(
        nothing.json()["error"]
            .as_str()
            .unwrap()
            .contains("k8e server")
    );
    // The next one adopts what was running.
    server.stop();
    server.restart();
    assert_eq!(run(&server, "cat f").out(), "kept\n");
    assert!(is_running(&server));
}

#[test]
fn an_auto_started_server_is_stopped() {
    let dir = passable_tempdir("k8e-control-auto-");
    let data = dir.path().join("data");
    let k8e = |args: &[&str]| {
        ran(Command::new(binary())
            .args(args)
            .env("K8E_DATA_DIR", &data)
            .env_remove("K8E_SANDBOX_ENDPOINT")
            .env_remove("K8E_NO_AUTOSTART")
            .stdin(Stdio::null()))
    };
    let _stopped = Stopped(&data);
    let first = k8e(&["sandbox", "run", "--runtime", "native", "echo auto"]);
    assert_eq!(first.code, 0, "{}", first.all());
    let session = first.json()["session_id"].as_str().unwrap().to_owned();
    let status = control(&data, &["status"]).json();
    assert_eq!(status["autostarted"], true, "{status}");
    let restarted = control(&data, &["restart"]);
    assert_eq!(restarted.code, 0, "{}", restarted.all());
    let status = control(&data, &["status"]).json();
    assert_eq!(status["autostarted"], true, "{status}");
    assert_eq!(k8e(&["sandbox", "destroy", &session]).code, 0);
    let stopped = control(&data, &["stop"]);
    assert_eq!(stopped.code, 0, "{}", stopped.all());
    assert_eq!(k8e(&["sandbox", "status", "--no-autostart"]).code, 2);
}

#[test]
fn who_is_not_root_is_told_so() {
    let dir = passable_tempdir("k8e-control-user-");
    let data = dir.path().join("data");
    let server = Server::start_in(&data);
    let copy = dir.path().join("k8e");
    k8e_e2e::install(&binary(), &copy);
    for command in ["stop", "status", "restart"] {
        let output = ran(Command::new(&copy)
            .args(["server", command, "--data-dir"])
            .arg(&data)
            .uid(65534)
            .gid(65534)
            .stdin(Stdio::null()));
        assert_eq!(output.code, 1, "{}", output.all());
        let error = output.json()["error"].as_str().unwrap().to_owned();
        assert!(error.contains("sudo"), "{error}");
    }
    assert_eq!(server.k8e(&["sandbox", "status"]).code, 0);
}

#[test]
fn idle_sessions_of_the_caller_are_pruned() {
    let server = Server::start_with(&["--listen", "127.0.0.1:0"]);
    let (idle, busy) = (server.session().id, server.session().id);
    let run = [
        "sandbox",
        "run",
        "--background",
        "sleep 1000",
        "--session-id",
        &busy,
    ];
    assert_eq!(server.k8e(&run).code, 0);
    let certs = cert_dir(&server);
    let ann = key(&server, "ann", &[]);
    let of_ann = ran(remote(&server, certs.path(), &ann).args(["sandbox", "create"]));
    let of_ann = of_ann.json()["session_id"].as_str().unwrap().to_owned();

    let asks = server.k8e(&["sandbox", "prune", "--idle", "1ms"]);
    assert_eq!(asks.code, 1, "{}", asks.all());
    assert!(
        asks.json()["error"].as_str().unwrap().contains("--yes"),
        "{}",
        asks.all()
    );
    let young = server.k8e(&["sandbox", "prune", "--yes"]).json();
    assert_eq!(
        (&young["pruned"], &young["kept"]),
        (&serde_json::json!([]), &2.into()),
        "{young}"
    );
    for (flag, is_dry) in [("--dry-run", true), ("--yes", false)] {
        let pruned = server.k8e(&["sandbox", "prune", "--idle", "1ms", flag]);
        assert_eq!(pruned.code, 0, "{}", pruned.all());
        let json = pruned.json();
        assert_eq!(json["dry_run"], is_dry, "{json}");
        assert_eq!(json["pruned"].as_array().unwrap().len(), 1, "{json}");
        assert_eq!(json["pruned"][0]["session_id"], idle, "{json}");
        // The busy one; ann's are not the caller's.
        assert_eq!(json["kept"], 1, "{json}");
        assert_eq!(server.session_ids().contains(&idle), is_dry);
    }
    let ids = server.session_ids();
    assert!(ids.contains(&busy) && ids.contains(&of_ann), "{ids:?}");
    let own =
        ran(remote(&server, certs.path(), &ann)
            .args(["sandbox", "prune", "--idle", "1ms", "--yes"]));
    assert_eq!(
        own.json()["pruned"][0]["session_id"],
        of_ann,
        "{}",
        own.all()
    );
    assert_eq!(server.session_ids(), [busy]);
}
