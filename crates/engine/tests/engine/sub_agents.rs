//! Sub-agents: sessions that share the sandbox of their parent.

use super::*;
use k8e_model::{BackgroundStatus, EgressPolicy, SubAgentSpec, TimeLimit};

impl Server {
    async fn sub_agent(&self, parent: &str) -> Result<SessionView, Error> {
        // No directory of its own: the fake's workspace is this machine's.
        let spec = SubAgentSpec::new("helper", "").unwrap();
        self.sessions
            .create_sub_agent(&me(), &sid(parent), spec)
            .await
    }

    async fn child(&self, parent: &str) -> String {
        let view = self.sub_agent(parent).await.unwrap();
        view.session.id.to_string()
    }
}

fn alive(pid: &str) -> bool {
    // A zombie counts as dead.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

async fn gone(pid: &str) {
    let gone = async {
        while alive(pid) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("it ends");
}

/// Leaves a process behind; returns its pid.
async fn leave(server: &Server, id: &str) -> String {
    let script = "setsid sleep 600 >/dev/null 2>&1 & echo $!";
    let (out, _) = server.run(id, script).await.unwrap();
    String::from_utf8(out).unwrap().trim().to_owned()
}

#[tokio::test]
async fn a_sub_agent_is_a_session_in_its_parents_sandbox() {
    let server = Server::start().await;
    let parent = server
        .sessions
        .create(
            &me(),
            SessionSpec {
                env: [("GIVEN".to_owned(), "by parent".to_owned())]
                    .into_iter()
                    .collect::<std::collections::BTreeMap<_, _>>()
                    .try_into()
                    .unwrap(),
                tenant: "t".parse().ok(),
                ..spec("a")
            },
        )
        .await
        .unwrap()
        .session;
    let child = server.sub_agent("a").await.unwrap().session;
    assert!(child.id.as_str().starts_with("a-sub-"), "{}", child.id);
    assert_eq!(child.phase, Phase::Active);
    assert_eq!(
        (&child.owner, &child.tenant, child.limits, child.runtime),
        (&parent.owner, &parent.tenant, parent.limits, parent.runtime)
    );
    let sub = child.sub_agent.as_ref().unwrap();
    assert_eq!((&sub.parent, &*sub.kind), (&parent.id, "helper"));
    assert_eq!(server.driver.launched(), 1);

    let id = child.id.as_str();
    let script = "echo $K8E_PARENT_SESSION_ID $K8E_SESSION_ID $GIVEN";
    let (out, _) = server.run(id, script).await.unwrap();
    assert_eq!(
        String::from_utf8(out).unwrap(),
        format!("a {id} by parent\n")
    );
    // What it does is its own history.
    assert_eq!(server.kinds("a").await, ["created"]);
    assert_eq!(
        server.kinds(id).await,
        ["created", "run_started", "run_ended"]
    );
    let page = server.sessions.transcript(&me(), &sid("a"), 0, 0).await;
    assert_eq!(page.unwrap().output, b"");
    let page = server.sessions.transcript(&me(), &child.id, 0, 0).await;
    assert!(!page.unwrap().output.is_empty());
    // A run that names no session gets neither it nor its parent.
    let request = RunRequest {
        target: RunTarget::Tenant(SessionSpec {
            tenant: "t".parse().ok(),
            ..SessionSpec::default()
        }),
        command: sh("true"),
    };
    let run = server.sessions.run(&me(), request).await.unwrap();
    assert!(run.session_created);
}

#[tokio::test]
async fn operations_on_what_it_shares_are_refused() {
    let server = Server::start().await;
    server.create("a").await;
    let id = server.child("a").await;
    refused(
        server.sub_agent(&id).await,
        Code::Denied,
        "max depth 1 reached",
    );
    refused(
        server.sub_agent("none").await,
        Code::NotFound,
        "session none not found",
    );
    let sub = SubAgentSpec::new("", "").unwrap();
    let others = server
        .sessions
        .create_sub_agent(&other(), &sid("a"), sub)
        .await;
    refused(others, Code::NotFound, "session a not found");
    let shares = "is a sub-agent of a and shares its";
    let pause = server.sessions.pause(&me(), &sid(&id)).await;
    refused(pause, Code::Precondition, shares);
    let hosts = server
        .sessions
        .set_allowed_hosts(&me(), &sid(&id), EgressPolicy::None)
        .await;
    refused(hosts, Code::Precondition, shares);
    for _ in 1..16 {
        server.child("a").await;
    }
    refused(
        server.sub_agent("a").await,
        Code::Exhausted,
        "16 sub-agents",
    );
    server.sessions.destroy(&me(), &sid(&id)).await.unwrap();
    server.child("a").await;
    assert_eq!(server.sessions.status().active, 17);
}

#[tokio::test]
async fn it_counts_against_the_session_limits() {
    let config = Config {
        sessions_per_owner_max: 2,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    server.create("a").await;
    server.child("a").await;
    refused(
        server.sub_agent("a").await,
        Code::Exhausted,
        "you have 2 sessions alive",
    );
}

#[tokio::test]
async fn its_end_kills_its_own_processes_only() {
    let server = Server::start().await;
    let sandbox = server.create("a").await.session.sandbox;
    let (one, two) = (server.child("a").await, server.child("a").await);
    let mut left = Vec::new();
    for id in ["a", &one, &two] {
        left.push(leave(&server, id).await);
    }
    let background = RunRequest {
        target: RunTarget::Existing(sid(&one)),
        command: Command {
            timeout: TimeLimit::Never,
            ..sh("sleep 600")
        },
    };
    let background = server.sessions.start_background(&me(), background).await;
    let background = background.unwrap().run.id;
    server.sessions.destroy(&me(), &sid(&one)).await.unwrap();
    gone(&left[1]).await;
    assert!(alive(&left[0]) && alive(&left[2]));
    let over = async {
        loop {
            let run = server.sessions.poll_run(&me(), &background).await.unwrap();
            if run.status != BackgroundStatus::Running {
                return run.status;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let over = tokio::time::timeout(PATIENCE, over).await.expect("it ends");
    assert_eq!(over, BackgroundStatus::Cancelled);
    assert_eq!(server.driver.sandboxes(), [sandbox]);
    server.run("a", "true").await.unwrap();
    server.run(&two, "true").await.unwrap();

    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    assert_eq!(server.ended(&two).await, "its parent a ended");
    server.no_sandbox().await;
    for pid in &left {
        // The fake's processes run on this machine: they are killed here.
        if alive(pid) {
            std::process::Command::new("kill")
                .arg(pid)
                .status()
                .unwrap();
        }
    }
}

#[tokio::test]
async fn it_is_paused_and_recovered_with_its_parent() {
    let server = Server::start().await;
    server.create("a").await;
    let id = server.child("a").await;
    let (dead, out) = (server.child("a").await, server.run(&id, "echo x").await);
    out.unwrap();
    server.sessions.destroy(&me(), &sid(&dead)).await.unwrap();
    server.sessions.pause(&me(), &sid("a")).await.unwrap();
    let paused = "session a is paused: resume it first";
    refused(server.run(&id, "true").await, Code::Precondition, paused);
    refused(server.sub_agent("a").await, Code::Precondition, paused);
    let destroyed = server.sessions.destroy(&me(), &sid(&id)).await;
    refused(destroyed, Code::Precondition, paused);

    let server = server.restart().await;
    let view = server.sessions.get(&me(), &sid(&id)).await.unwrap();
    assert_eq!(view.session.phase, Phase::Paused);
    assert_eq!(server.sessions.status().active, 2);
    server.sessions.resume(&me(), &sid("a")).await.unwrap();
    assert_eq!(server.run(&id, "echo on").await.unwrap().0, b"on\n");
    let page = server.sessions.transcript(&me(), &sid(&id), 0, 0).await;
    assert_eq!(page.unwrap().output, b"x\non\n");
    refused(server.sub_agent(&id).await, Code::Denied, "max depth");
    assert_eq!(
        server.kinds(&id).await,
        [
            "created",
            "run_started",
            "run_ended",
            "paused",
            "recovered",
            "resumed",
            "run_started",
            "run_ended"
        ]
    );
}

#[tokio::test]
async fn it_does_not_outlive_its_parent() {
    let server = Server::start().await;
    let parent = server.create("a").await;
    let id = server.child("a").await;
    server.driver.kill(&parent.session.sandbox);
    server.ended("a").await;
    server.ended(&id).await;
    server.no_sandbox().await;

    let parent = server.create("b").await;
    let id = server.child("b").await;
    server.sessions.shutdown().await;
    server.driver.kill(&parent.session.sandbox);
    let server = server.start_again().await;
    server.ended("b").await;
    assert_eq!(
        server.ended(&id).await,
        "its parent was gone when the server came back"
    );
}
