//! Forks: sessions that go on from the point at which another one is, with memory on gVisor, with files on native.

use super::saved::{ask, at, holder, live_sandboxes, newest_runsc, reported, start, states, until};
use k8e_e2e::Server;
use serde_json::Value;

fn fork(server: &Server, id: &str, words: &[&str]) -> Value {
    let ran = server.k8e(&[&["sandbox", "fork", id], words].concat());
    assert_eq!(ran.code, 0, "{}\n{}", ran.all(), server.log_text());
    ran.json()
}

/// The ids of forks, each with this much of its parent's memory.
fn ids(forked: &Value, memory: &str) -> Vec<String> {
    let forks = forked["forks"].as_array().expect("a list");
    let id = |fork: &Value| {
        assert_eq!(fork["memory"], memory, "{fork}");
        assert_eq!(fork["session"]["phase"], "active", "{fork}");
        fork["session_id"].as_str().expect("an id").to_owned()
    };
    forks.iter().map(id).collect()
}

fn sessions(server: &Server, phase: &str) -> Vec<String> {
    let listed = server
        .k8e(&["sandbox", "sessions", "--phase", phase])
        .json();
    let listed = listed["sessions"].as_array().expect("a list").clone();
    let id = |session: &Value| session["session_id"].as_str().expect("an id").to_owned();
    listed.iter().map(id).collect()
}

#[test]
fn memory_and_files_go_on_in_every_fork_and_in_the_parent() {
    let runsc = newest_runsc();
    let mut server = start(&["--runsc", &runsc]);
    let id = holder(&server);
    let (kept, count) = ask(&server, &id);
    at(&server, &id).sh("echo parent > who");
    let forked = fork(&server, &id, &["--count", "3"]);
    assert!(
        forked["stopped_ms"].as_f64().expect("a time") > 0.0,
        "{forked}"
    );
    let forks = ids(&forked, "copied");
    assert_eq!(
        (forks.len(), live_sandboxes(&server), states(&server)),
        (3, 4, 0)
    );
    for fork in &forks {
        let (now, counted) = ask(&server, fork);
        assert!(
            now == kept && counted > count,
            "{now} {counted}, was {kept} {count}"
        );
        let session = at(&server, fork);
        assert_eq!(session.sh("cat who; ls /workspace/local.sock").code, 0);
        assert_eq!(session.sh(&format!("echo {fork} > who")).code, 0);
    }
    // What becomes of one is nothing to the others.
    at(&server, &forks[0]).sh("pkill -f 'server.accept' || pkill python3; rm -rf /workspace/*");
    for other in [&id, &forks[1], &forks[2]] {
        let (now, before) = ask(&server, other);
        assert_eq!(now, kept);
        assert!(ask(&server, other).1 > before);
    }
    assert_eq!(at(&server, &id).sh("cat who").out(), "parent\n");
    assert_eq!(at(&server, &forks[1]).sh("cat who").out().trim(), forks[1]);
    // The parent's background run is still followed.
    let runs = server.k8e(&["sandbox", "runs", &id]).json();
    assert_eq!(runs["runs"][0]["status"], "running", "{runs}");
    reported(&server, &forks[1], "forked_from", 1);

    // A fork of a fork, and one of a session that is saved and stays so.
    let again = ids(&fork(&server, &forks[1], &[]), "copied").remove(0);
    assert_eq!(ask(&server, &again).0, kept);
    assert_eq!(at(&server, &again).sh("cat who").out().trim(), forks[1]);
    let paused = server.k8e(&["sandbox", "pause", &again]);
    assert_eq!(paused.code, 0, "{}", paused.all());
    reported(&server, &again, "saved", 1);
    let of_saved = ids(&fork(&server, &again, &["--count", "2"]), "copied");
    for fork in &of_saved {
        assert_eq!(ask(&server, fork).0, kept);
    }
    assert_eq!(sessions(&server, "paused"), std::slice::from_ref(&again));
    server.kill();
    server.restart();
    let resumed = server.k8e(&["sandbox", "resume", &again]);
    assert_eq!(resumed.code, 0, "{}", resumed.all());
    for id in [&again, &of_saved[0], &forks[2], &id] {
        assert_eq!(ask(&server, id).0, kept);
    }
    for id in sessions(&server, "active") {
        at(&server, &id).destroy();
    }
    assert_eq!((live_sandboxes(&server), states(&server)), (0, 0));
}

#[test]
fn a_session_with_an_open_stream_is_not_forked_and_a_killed_server_leaves_no_half_fork() {
    let runsc = newest_runsc();
    let mut server = start(&["--runsc", &runsc]);
    let id = holder(&server);
    let (kept, _) = ask(&server, &id);
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
    let refused = server.k8e(&["sandbox", "fork", &id]);
    assert_eq!(refused.code, 1, "{}", refused.all());
    assert!(
        refused.out().contains("cannot be forked now"),
        "{}",
        refused.all()
    );
    assert_eq!(ask(&server, &id).0, kept);
    waiting.kill().unwrap();
    waiting.wait().unwrap();
    until("the command has ended", || {
        at(&server, &id).sh("pgrep -x sleep").code != 0
    });

    let mut forking = server.command(&["sandbox", "fork", &id, "--count", "3"]);
    let mut forking = forking.spawn().unwrap();
    until("the parent is copied", || states(&server) > 0);
    server.kill();
    forking.kill().ok();
    forking.wait().unwrap();
    server.restart();
    // Forks that were complete are sessions; of the others nothing is left.
    until("half forks are gone", || {
        sessions(&server, "creating").is_empty()
            && live_sandboxes(&server) == sessions(&server, "active").len()
    });
    assert_eq!(states(&server), 0);
    assert_eq!(ask(&server, &id).0, kept);
}

#[test]
fn forks_of_native_sessions_have_the_files_and_the_options() {
    let server = Server::start_with(&[
        "--default-runtime",
        "native",
        "--max-sessions-per-owner",
        "4",
    ]);
    let created = server.k8e(&[
        "sandbox",
        "create",
        "--label",
        "team=blue",
        "--memory",
        "96MiB",
        "--ttl",
        "1h",
        "--allowed-hosts",
        "example.com",
    ]);
    assert_eq!(created.code, 0, "{}", created.all());
    let parent = created.json();
    let id = parent["session_id"].as_str().unwrap().to_owned();
    let session = at(&server, &id);
    let make = "mkdir -p a/b; head -c 3000000 /dev/urandom > a/b/big; ln a/b/big same; ln -s a/b link; \
        truncate -s 5M sparse; chmod 640 sparse; chown 1000:1001 same; : > empty; nohup sleep 600 > /dev/null 2>&1 &";
    assert_eq!(session.sh(make).code, 0);
    let look =
        "find . | sort | xargs stat -c '%n %a %u:%g %s %h %Y' | grep -v '^\\. '; sha256sum a/b/big";
    let looked = session.sh(look).out();
    let forked = fork(&server, &id, &["--count", "2", "--ttl", "10m"]);
    let forks = ids(&forked, "none");
    assert!(
        forked["forks"][0]["reason"]
            .as_str()
            .unwrap()
            .contains("gVisor"),
        "{forked}"
    );
    for fork in &forks {
        let shown = server.k8e(&["sandbox", "get", fork]).json();
        for same in [
            "owner",
            "tenant_id",
            "labels",
            "limits",
            "allowed_hosts",
            "runtime",
        ] {
            assert_eq!(shown[same], parent[same], "{same}");
        }
        let lives = shown["expires_at"].as_i64().unwrap() - shown["created_at"].as_i64().unwrap();
        assert_eq!(lives, 600);
        let copy = at(&server, fork);
        assert_eq!(copy.sh(look).out(), looked);
        assert_ne!(copy.sh("pgrep -x sleep").code, 0, "files only");
        assert_eq!(copy.sh("echo other > a/b/big").code, 0);
    }
    assert_eq!(session.sh(look).out(), looked);
    assert_eq!(session.sh("pgrep -x sleep").code, 0, "the parent goes on");
    // Quotas are checked before anything is made, and for all forks together.
    let refused = server.k8e(&["sandbox", "fork", &id, "--count", "2"]);
    assert_eq!(refused.code, 1, "{}", refused.all());
    assert_eq!(refused.json()["detail"], "exhausted", "{}", refused.all());
    assert_eq!(sessions(&server, "active").len(), 3);
    let many = server.k8e(&["sandbox", "fork", &id, "--count", "21"]);
    assert!(many.out().contains("1 to 20"), "{}", many.all());
    let sub: Value = server.k8e(&["sandbox", "subagent", &id]).json();
    let sub = sub["session_id"].as_str().unwrap();
    let of_sub = server.k8e(&["sandbox", "fork", sub]);
    assert!(of_sub.out().contains("sub-agent"), "{}", of_sub.all());
}
