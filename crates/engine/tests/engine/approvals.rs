//! Approvals: request, wait, one final decision, and not by the requester.

use super::*;
use k8e_engine::{ApprovalFilter, AuditQuery};
use k8e_model::{Approval, ApprovalReason, ApprovalState, ApprovalTime, Caller, Lifetime, Proof};

/// The requester.
fn agent() -> Caller {
    Caller {
        principal: me(),
        proof: Proof::Key("key-agent".parse().unwrap()),
        session: None,
    }
}

/// The same owner with another key.
fn person() -> Caller {
    Caller {
        proof: Proof::Key("key-person".parse().unwrap()),
        ..agent()
    }
}

fn root() -> Caller {
    Caller {
        principal: Principal::local(),
        proof: Proof::Local,
        session: None,
    }
}

async fn ask_for(server: &Server, id: &str, ms: u64) -> Result<Approval, Error> {
    let action = "drop the table".to_owned().try_into().unwrap();
    let time = ApprovalTime::from_ms(ms).unwrap();
    let sessions = &server.sessions;
    sessions
        .request_approval(&agent(), &sid(id), action, time)
        .await
}

async fn ask(server: &Server, id: &str) -> Approval {
    ask_for(server, id, 0).await.unwrap()
}

async fn decide(
    server: &Server,
    caller: &Caller,
    approval: &Approval,
    approved: bool,
) -> Result<Approval, Error> {
    let reason: ApprovalReason = "because".to_owned().try_into().unwrap();
    let sessions = &server.sessions;
    sessions
        .decide_approval(caller, &approval.id, approved, reason)
        .await
}

async fn wait(server: &Server, approval: &Approval) -> Result<Approval, Error> {
    let me = me();
    let waiting = server.sessions.wait_approval(&me, &approval.id);
    tokio::time::timeout(PATIENCE, waiting)
        .await
        .expect("a wait ends")
}

async fn listed(server: &Server, who: &Principal, all: bool) -> Vec<String> {
    let filter = ApprovalFilter { session: None, all };
    let listed = server.sessions.list_approvals(who, &filter).await.unwrap();
    let state = |approval: Approval| approval.state.as_str().to_owned();
    listed.into_iter().map(state).collect()
}

fn decision(approval: &Approval) -> (bool, &str, &str) {
    match &approval.state {
        ApprovalState::Decided(decision) => (
            decision.approved,
            decision.reason.as_str(),
            &decision.by.principal,
        ),
        state => panic!("it is decided, not {state:?}"),
    }
}

#[tokio::test]
async fn a_call_waits_for_the_decision_and_its_reason() {
    let server = Server::start().await;
    server.create("s").await;
    let approval = ask(&server, "s").await;
    assert_eq!(approval.owner, me().name());
    assert_eq!(listed(&server, &me(), false).await, ["pending"]);
    let (waited, decided) = tokio::join!(wait(&server, &approval), async {
        tokio::task::yield_now().await;
        decide(&server, &person(), &approval, true).await
    });
    assert_eq!(decision(&waited.unwrap()), (true, "because", me().name()));
    assert!(decision(&decided.unwrap()).0);
    // A wait after the decision returns at once, every time.
    for _ in 0..2 {
        assert!(decision(&wait(&server, &approval).await.unwrap()).0);
    }
    assert!(listed(&server, &me(), false).await.is_empty());
    assert_eq!(listed(&server, &me(), true).await, ["approved"]);
    let refused_one = ask(&server, "s").await;
    decide(&server, &person(), &refused_one, false)
        .await
        .unwrap();
    assert!(!decision(&wait(&server, &refused_one).await.unwrap()).0);
}

#[tokio::test]
async fn events_and_audit_rows_are_recorded() {
    let server = Server::start().await;
    server.create("s").await;
    let approval = ask(&server, "s").await;
    decide(&server, &person(), &approval, true).await.unwrap();
    let events = server.sessions.events(&me(), &sid("s"), 0, 0).await;
    let events = events.unwrap().events;
    let told: Vec<_> = events.iter().map(|event| event.kind.as_str()).collect();
    assert_eq!(told, ["created", "approval_asked", "approval_decided"]);
    assert!(events[1].detail.contains("drop the table"));
    assert!(events[2].detail.contains("because"));
    let rows = server
        .sessions
        .audit(&Principal::local(), &AuditQuery::default())
        .await
        .unwrap();
    let row = |action: &str| rows.iter().find(|row| row.action == action).unwrap();
    assert_eq!(row("approval.request").object, format!("{} s", approval.id));
    assert_eq!(row("approval.decide").object, approval.id.as_str());
}

#[tokio::test]
async fn a_decision_is_final() {
    let server = Server::start().await;
    server.create("s").await;
    let approval = ask(&server, "s").await;
    decide(&server, &person(), &approval, false).await.unwrap();
    refused(
        decide(&server, &root(), &approval, true).await,
        Code::Precondition,
        "was rejected by cert:me already",
    );
    assert!(!decision(&wait(&server, &approval).await.unwrap()).0);
    // Of concurrent decisions one wins.
    let approval = ask(&server, "s").await;
    let (person, root) = (person(), root());
    let (one, two) = tokio::join!(
        decide(&server, &person, &approval, true),
        decide(&server, &root, &approval, false)
    );
    assert_ne!(one.is_ok(), two.is_ok());
}

#[tokio::test]
async fn the_requester_cannot_decide() {
    let server = Server::start().await;
    server.create("s").await;
    let approval = ask(&server, "s").await;
    let denied = "by who asked for it";
    refused(
        decide(&server, &agent(), &approval, true).await,
        Code::Denied,
        denied,
    );
    for caller in [person(), root()] {
        let from_it = Caller {
            session: Some(sid("s")),
            ..caller
        };
        refused(
            decide(&server, &from_it, &approval, true).await,
            Code::Denied,
            denied,
        );
    }
    assert_eq!(listed(&server, &me(), false).await, ["pending"]);
    let from_another = Caller {
        session: Some(sid("t")),
        ..root()
    };
    decide(&server, &from_another, &approval, true)
        .await
        .unwrap();
}

#[tokio::test]
async fn approvals_of_other_owners_are_not_found() {
    let server = Server::start().await;
    server.create("s").await;
    let approval = ask(&server, "s").await;
    let text = format!("approval {} not found", approval.id);
    let stranger = Caller {
        principal: other(),
        proof: Proof::Key("key-other".parse().unwrap()),
        session: None,
    };
    let loopback = Caller {
        principal: Principal::loopback(),
        proof: Proof::Local,
        session: None,
    };
    let decided = decide(&server, &stranger, &approval, true).await;
    refused(decided, Code::NotFound, &text);
    let waited = server.sessions.wait_approval(&other(), &approval.id).await;
    refused(waited, Code::NotFound, &text);
    assert!(listed(&server, &other(), true).await.is_empty());
    let of_mine = ApprovalFilter {
        session: Some(sid("s")),
        all: true,
    };
    let shown = server.sessions.list_approvals(&other(), &of_mine).await;
    refused(shown, Code::NotFound, "session s not found");
    let action = "x".to_owned().try_into().unwrap();
    let asked = server
        .sessions
        .request_approval(&stranger, &sid("s"), action, ApprovalTime::default())
        .await;
    refused(asked, Code::NotFound, "session s not found");
    // The operator of the server sees it, and decides.
    assert_eq!(
        listed(&server, &Principal::local(), false).await,
        ["pending"]
    );
    decide(&server, &loopback, &approval, true).await.unwrap();
}

#[tokio::test]
async fn an_approval_times_out() {
    let server = Server::start().await;
    server.create("s").await;
    let approval = ask_for(&server, "s", 60).await.unwrap();
    refused(
        wait(&server, &approval).await,
        Code::Timeout,
        "approval timed out after 60ms",
    );
    refused(
        decide(&server, &person(), &approval, true).await,
        Code::Precondition,
        "expired",
    );
    refused(wait(&server, &approval).await, Code::Timeout, "timed out");
    assert_eq!(listed(&server, &me(), true).await, ["expired"]);
}

#[tokio::test]
async fn a_cancelled_wait_changes_nothing() {
    let server = Server::start().await;
    server.create("s").await;
    let approval = ask(&server, "s").await;
    {
        let me = me();
        let waiting = server.sessions.wait_approval(&me, &approval.id);
        let short = Duration::from_millis(20);
        assert!(tokio::time::timeout(short, waiting).await.is_err());
    }
    assert_eq!(listed(&server, &me(), false).await, ["pending"]);
    decide(&server, &person(), &approval, true).await.unwrap();
    assert!(decision(&wait(&server, &approval).await.unwrap()).0);
}

#[tokio::test]
async fn the_end_of_a_session_ends_the_wait() {
    let server = Server::start().await;
    server.create("s").await;
    let approval = ask(&server, "s").await;
    let me = me();
    let id = sid("s");
    let (waited, destroyed) =
        tokio::join!(wait(&server, &approval), server.sessions.destroy(&me, &id));
    destroyed.unwrap();
    refused(waited, Code::Unavailable, "its owner destroyed it");
    refused(
        wait(&server, &approval).await,
        Code::Unavailable,
        "its owner destroyed it",
    );
    refused(
        decide(&server, &person(), &approval, true).await,
        Code::Precondition,
        "its session ended",
    );
    refused(ask_for(&server, "s", 0).await, Code::NotFound, "it ended");
    assert!(listed(&server, &me, false).await.is_empty());
    assert_eq!(listed(&server, &me, true).await, ["expired"]);
    // A new session of that id has no approvals.
    server.create("s").await;
    assert!(listed(&server, &me, true).await.is_empty());
}

#[tokio::test]
async fn approvals_survive_a_restart() {
    let server = Server::start().await;
    server.create("s").await;
    let (one, two) = (ask(&server, "s").await, ask(&server, "s").await);
    decide(&server, &person(), &one, true).await.unwrap();
    let waiting = tokio::spawn({
        let (sessions, id) = (server.sessions.clone(), two.id.clone());
        async move { sessions.wait_approval(&me(), &id).await }
    });
    tokio::task::yield_now().await;
    let server = server.restart().await;
    refused(waiting.await.unwrap(), Code::Unavailable, "stopping");
    assert_eq!(decision(&wait(&server, &one).await.unwrap()).1, "because");
    refused(
        decide(&server, &agent(), &two, true).await,
        Code::Denied,
        "the same key",
    );
    let (waited, decided) = tokio::join!(wait(&server, &two), async {
        tokio::task::yield_now().await;
        decide(&server, &root(), &two, true).await
    });
    decided.unwrap();
    assert_eq!(decision(&waited.unwrap()), (true, "because", "local"));
}

#[tokio::test]
async fn pending_approvals_are_limited() {
    let server = Server::start().await;
    server.create("s").await;
    server.create("t").await;
    for _ in 0..64 {
        ask(&server, "s").await;
    }
    refused(
        ask_for(&server, "s", 0).await,
        Code::Exhausted,
        "64 approvals",
    );
    let first = ask(&server, "t").await;
    for _ in 0..k8e_store::APPROVALS_KEPT_MAX {
        let approval = ask(&server, "t").await;
        decide(&server, &person(), &approval, true).await.unwrap();
    }
    let of_t = ApprovalFilter {
        session: Some(sid("t")),
        all: true,
    };
    let kept = server.sessions.list_approvals(&me(), &of_t).await.unwrap();
    assert_eq!(kept.len(), k8e_store::APPROVALS_KEPT_MAX);
    assert_eq!(kept[0].id, first.id, "what waits is kept");
}

#[tokio::test]
async fn a_waiting_call_holds_off_idle_expiry() {
    let server = Server::start().await;
    let soon_idle = SessionSpec {
        lifetime: Lifetime {
            ttl: None,
            idle: Some(Duration::from_secs(2)),
        }
        .into(),
        ..spec("s")
    };
    server.sessions.create(&me(), soon_idle).await.unwrap();
    let approval = ask_for(&server, "s", 4000).await.unwrap();
    refused(wait(&server, &approval).await, Code::Timeout, "timed out");
    assert!(server.ended("s").await.contains("it was idle for"));
}
