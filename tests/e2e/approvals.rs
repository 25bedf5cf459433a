//! Approvals from the command line: an agent asks, a person answers, and the server may die meanwhile.

use crate::identity::{cert_dir, key, ran, remote};
use k8e_e2e::{Ran, Server};
use serde_json::Value;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// On a busy machine too.
const SOON: Duration = Duration::from_secs(20);

fn start(command: &mut Command, args: &[&str]) -> Child {
    command
        .args(["sandbox", "confirm"])
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn finish(child: Child) -> Ran {
    let output = child.wait_with_output().unwrap();
    Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: output.stdout,
        stderr: output.stderr,
    }
}

fn pending(server: &Server) -> Vec<Value> {
    let listed = server.k8e(&["sandbox", "approvals"]).json();
    listed["approvals"].as_array().unwrap().clone()
}

/// The id of the one question that waits, when it does.
fn question(server: &Server) -> String {
    let begun = Instant::now();
    loop {
        if let [one] = pending(server).as_slice() {
            return one["approval_id"].as_str().unwrap().to_owned();
        }
        assert!(begun.elapsed() < SOON, "nobody asked");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn an_agent_goes_on_when_somebody_says_yes() {
    let server = Server::start();
    let session = server.session();
    let args = [session.id.as_str(), "drop the table", "--timeout", "1m"];
    let asking = start(&mut server.command(&[]), &args);
    let id = question(&server);
    let shown = &pending(&server)[0];
    assert_eq!(shown["action"], "drop the table");
    assert_eq!(shown["session_id"], session.id);
    assert_eq!(
        shown["expires_at"].as_i64().unwrap() - shown["asked_at"].as_i64().unwrap(),
        60
    );
    // An agent has this set, and says so.
    let by_agent = ran(server
        .command(&["sandbox", "approve", &id])
        .env("K8E_SANDBOX_SESSION_ID", &session.id));
    assert_eq!(by_agent.code, 1);
    assert_eq!(by_agent.json()["detail"], "denied", "{}", by_agent.all());
    let yes = server.k8e(&["sandbox", "approve", &id, "--reason", "it is a copy"]);
    assert_eq!(yes.json()["ok"], true, "{}", yes.all());
    let asked = finish(asking);
    assert_eq!(asked.code, 0, "{}", asked.all());
    assert!(asked.err().contains(&format!("k8e sandbox approve {id}")));
    let answer = asked.json();
    assert_eq!(answer["approved"], true);
    assert_eq!(answer["approval_id"], id);
    assert_eq!(answer["reason"], "it is a copy");
    let twice = server.k8e(&["sandbox", "approve", &id, "--reject"]);
    assert_eq!(twice.json()["detail"], "precondition");
    assert!(pending(&server).is_empty());
    let events = server.k8e(&["sandbox", "events", &session.id]).out();
    assert!(events.contains("approval_asked") && events.contains("it is a copy"));
}

#[test]
fn no_and_nobody_are_no() {
    let server = Server::start();
    let session = server.session();
    let args = [session.id.as_str(), "push to main", "--no-wait"];
    let asked = finish(start(&mut server.command(&[]), &args));
    assert_eq!(asked.code, 0, "{}", asked.all());
    assert_eq!(asked.json()["approved"], false);
    let id = asked.json()["approval_id"].as_str().unwrap().to_owned();
    let no = [
        "sandbox",
        "approve",
        &id,
        "--reject",
        "--reason",
        "not today",
    ];
    assert_eq!(server.k8e(&no).json()["state"], "rejected");
    let answer = finish(start(&mut server.command(&[]), &["--approval-id", &id]));
    assert_eq!(answer.code, 1);
    assert_eq!(answer.json()["approved"], false);
    assert_eq!(answer.json()["reason"], "not today");

    let args = [session.id.as_str(), "push to main", "--timeout", "200ms"];
    let late = finish(start(&mut server.command(&[]), &args));
    assert_eq!(late.code, 1);
    assert_eq!(late.json()["state"], "expired");
    assert!(late.err().contains("approval timed out after 200ms"));
    let id = late.json()["approval_id"].as_str().unwrap().to_owned();
    let too_late = server.k8e(&["sandbox", "approve", &id]);
    assert_eq!(too_late.json()["detail"], "precondition");
    for bad in [
        &["sandbox", "confirm", &session.id, "x", "--timeout", "25h"][..],
        &["sandbox", "confirm", &session.id, "x", "--timeout", "never"],
        &["sandbox", "confirm", &session.id, ""],
        &["sandbox", "confirm", "no-such-session", "x"],
        &["sandbox", "approve", "approval-none"],
    ] {
        assert_eq!(server.k8e(bad).code, 1, "{bad:?}");
    }
}

#[test]
fn a_question_survives_the_server() {
    let mut server = Server::start();
    let session = server.session().id;
    let args = [session.as_str(), "drop the table", "--timeout", "10m"];
    let asking = start(&mut server.command(&[]), &args);
    let id = question(&server);
    server.kill();
    let lost = finish(asking);
    assert_eq!(lost.code, 2, "{}", lost.all());
    assert!(lost.err().contains(&id), "it can be waited for again");
    server.restart();
    assert_eq!(question(&server), id);
    let asking = start(&mut server.command(&[]), &["--approval-id", &id]);
    assert_eq!(server.k8e(&["sandbox", "approve", &id]).code, 0);
    let asked = finish(asking);
    assert_eq!(asked.json()["approved"], true, "{}", asked.all());
    server.kill();
    server.restart();
    let again = finish(start(&mut server.command(&[]), &["--approval-id", &id]));
    assert_eq!(again.json()["approved"], true, "{}", again.all());
}

#[test]
fn a_key_does_not_answer_its_own_question() {
    let server = Server::start_with(&["--listen", "127.0.0.1:0"]);
    let certs = cert_dir(&server);
    let agent = key(&server, "ann-agent", &["--principal", "ann"]);
    let phone = key(&server, "ann-phone", &["--principal", "ann"]);
    let bob = key(&server, "bob", &[]);
    let by = |key: &str, args: &[&str]| ran(remote(&server, certs.path(), key).args(args));
    let made = by(&agent, &["sandbox", "create"]).json();
    let session = made["session_id"].as_str().unwrap();
    let asking = start(
        &mut remote(&server, certs.path(), &agent),
        &[session, "pay the bill", "--timeout", "1m"],
    );
    let id = question(&server);
    let approve = ["sandbox", "approve", &id];
    assert_eq!(by(&agent, &approve).json()["detail"], "denied");
    let hidden = by(&bob, &approve).json();
    assert_eq!(hidden["error"], format!("approval {id} not found"));
    let listed = by(&bob, &["sandbox", "approvals", "--all"]).json();
    assert_eq!(listed["approvals"].as_array().unwrap().len(), 0);
    let listed = by(&phone, &["sandbox", "approvals"]).json();
    assert_eq!(listed["approvals"][0]["asked_by"], "user:ann");
    assert_eq!(by(&phone, &approve).json()["ok"], true);
    assert_eq!(finish(asking).json()["decided_by"], "user:ann");
    let rows = server.k8e(&["audit"]).out();
    let of_ours: Vec<_> = rows
        .lines()
        .filter(|row| row.contains("approval.decide"))
        .map(|row| serde_json::from_str::<Value>(row).unwrap()["code"].clone())
        .collect();
    assert_eq!(of_ours, ["denied", "not_found", "ok"]);
}
