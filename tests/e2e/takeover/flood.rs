//! A server that was taken over floods the launcher: how many processes that makes is bounded.

use super::{ANSWERED, Server, ask, channel, launchers, sandbox_dir};
use rustix::net::SendFlags;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// What the launcher has forked at once at most: 128 that make a sandbox, 128 that remove one, 64 others.
const CHILDREN_MAX: usize = 320;

/// Messages of each kind; of launches, which are real ones.
const MESSAGES: usize = 1500;
const LAUNCHES: usize = 1000;

/// Far more than the requests that are under way take.
const PATIENCE: Duration = Duration::from_secs(120);

/// Of a process, those that it has forked and that have not become another program.
fn forked(worker: u32) -> usize {
    let children = std::fs::read_to_string(format!("/proc/{worker}/task/{worker}/children"));
    let children = children.unwrap_or_default();
    let is_launcher = |pid: &&str| {
        std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"k8e-l"))
    };
    children.split_whitespace().filter(is_launcher).count()
}

fn send(channel: &OwnedFd, message: &Value) {
    let bytes = serde_json::to_vec(message).unwrap();
    rustix::net::send(channel, &bytes, SendFlags::NOSIGNAL).unwrap();
}

fn ids(channel: &OwnedFd) -> HashSet<String> {
    let mut all = HashSet::new();
    let mut after = Value::Null;
    loop {
        let question = json!({"List": {"kind": "Native", "after": after}});
        let answer = ask(channel, question.to_string().as_bytes(), ANSWERED).expect("an answer");
        let ids = answer["Ids"].as_array().expect("ids").clone();
        let Some(last) = ids.last() else {
            return all;
        };
        after = last.clone();
        all.extend(ids.iter().map(|id| id.as_str().unwrap().to_owned()));
    }
}

#[test]
fn a_flood_of_requests_makes_a_bounded_number_of_processes() {
    let server = Server::start();
    let (session, victim) = (server.session(), server.session());
    let worker = *launchers(&server).last().unwrap();
    let channel = channel(&server);
    let before = ids(&channel);
    let limits =
        json!({"memory_bytes": 64 << 20, "cpu_millis": 1000, "pids": 64, "disk_bytes": 64 << 20});
    let most = std::thread::scope(|scope| {
        // Nobody waits for answers: each is a message and no more.
        let flood = scope.spawn(|| {
            for n in 0..LAUNCHES {
                let spec =
                    json!({"id": format!("flood-{n}"), "template": "host", "limits": limits});
                send(
                    &channel,
                    &json!({"Launch": {"kind": "Native", "platform": "systrap", "spec": spec}}),
                );
            }
            // While as many launches are under way as may be, a sandbox is removed.
            victim.destroy();
            for n in 0..MESSAGES {
                let nobody = json!({"kind": "Native", "id": format!("nobody-{n}")});
                send(&channel, &json!({"Remove": nobody}));
                send(&channel, &json!({"OpenGate": nobody}));
                send(&channel, &json!({"Freeze": nobody}));
            }
        });
        let mut most = 0;
        while !flood.is_finished() {
            most = most.max(forked(worker));
        }
        flood.join().unwrap();
        most
    });
    assert!(most > 1, "no process was seen: the flood is not looked at");
    assert!(most <= CHILDREN_MAX, "{most} processes at once");
    // What was made has no session: only who has the channel can remove it.
    let deadline = Instant::now() + PATIENCE;
    while forked(worker) > 1 {
        assert!(Instant::now() < deadline, "requests do not end");
        std::thread::sleep(Duration::from_millis(20));
    }
    let made: Vec<String> = ids(&channel).difference(&before).cloned().collect();
    assert!(!made.is_empty(), "no launch of the flood was done");
    for id in made {
        let remove = json!({"Remove": {"kind": "Native", "id": id}});
        let answer = ask(&channel, remove.to_string().as_bytes(), ANSWERED).expect("an answer");
        assert_eq!(answer, json!("Done"), "{id}");
    }
    // The same launcher, and what it does for the server works as before.
    assert_eq!(*launchers(&server).last().unwrap(), worker);
    assert_eq!(session.sh("echo fine").out(), "fine\n");
    assert_eq!(server.session().sh("echo fine").out(), "fine\n");
    assert!(sandbox_dir(&server).exists());
    server.assert_traces(2);
}
