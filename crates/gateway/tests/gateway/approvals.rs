//! Approvals over the wire: who is the same, and what ends a wait.

use crate::login::{login, with};
use crate::server::{SOON, TestServer};
use k8e_api::client::{Client, working_for};
use k8e_api::v1;
use tonic::{Code, Status};

async fn session(client: &mut Client) -> String {
    let create = v1::CreateSessionRequest::default();
    let made = client.create_session(create).await.unwrap();
    made.into_inner().session_id
}

async fn ask(client: &mut Client, session: &str) -> Result<v1::Approval, Status> {
    let request = v1::RequestApprovalRequest {
        session_id: session.to_owned(),
        action: "drop the table".to_owned(),
        expires_in_ms: 0,
    };
    let asked = client.approvals.request_approval(request).await?;
    Ok(asked.into_inner())
}

async fn wait(client: &Client, id: &str) -> Result<v1::Approval, Status> {
    let request = v1::WaitApprovalRequest {
        approval_id: id.to_owned(),
    };
    let mut approvals = client.approvals.clone();
    let waiting = approvals.wait_approval(request);
    let answer = tokio::time::timeout(SOON, waiting).await;
    Ok(answer.expect("a wait ends")?.into_inner())
}

async fn decide(client: &mut Client, id: &str, from: &str) -> Result<v1::Approval, Status> {
    let request = v1::DecideApprovalRequest {
        approval_id: id.to_owned(),
        approved: true,
        reason: "fine".to_owned(),
    };
    let request = working_for(from, request);
    let decided = client.approvals.decide_approval(request).await?;
    Ok(decided.into_inner())
}

/// Another key of the same person.
async fn second_key(server: &TestServer) -> Client {
    let request = v1::CreateKeyRequest {
        name: "ann-phone".to_owned(),
        principal: "ann".to_owned(),
        ..Default::default()
    };
    let made = server.local().await.identity.create_key(request).await;
    let key = k8e_model::ApiKey::parse(&made.unwrap().into_inner().secret).unwrap();
    server.with_key(&key).await
}

#[tokio::test(flavor = "multi_thread")]
async fn who_asked_cannot_decide_with_the_key_nor_with_a_certificate_for_it() {
    let server = TestServer::start().await;
    let mut ann = server.with_key(&server.key("ann").await).await;
    let id = session(&mut ann).await;
    let asked = ask(&mut ann, &id).await.unwrap();
    assert_eq!(
        (asked.state.as_str(), asked.owner.as_str()),
        ("pending", "user:ann")
    );
    assert!(asked.asked_with.starts_with("key:key-"), "{asked:?}");
    let (identity, _) = login(&mut ann).await.unwrap();
    let mut same = with(&server, &identity).await;
    for client in [&mut ann, &mut same] {
        let denied = decide(client, &asked.approval_id, "").await.unwrap_err();
        assert_eq!(denied.code(), Code::PermissionDenied, "{denied}");
    }
    let mut phone = second_key(&server).await;
    let mut root = server.local().await;
    for client in [&mut phone, &mut root] {
        let denied = decide(client, &asked.approval_id, &id).await.unwrap_err();
        assert_eq!(denied.code(), Code::PermissionDenied, "{denied}");
    }
    let (waited, decided) = tokio::join!(
        wait(&ann, &asked.approval_id),
        decide(&mut phone, &asked.approval_id, "")
    );
    let (waited, decided) = (waited.unwrap(), decided.unwrap());
    assert_eq!(waited, decided);
    assert_eq!(
        (waited.state.as_str(), waited.reason.as_str()),
        ("approved", "fine")
    );
    assert_ne!(waited.asked_with, waited.decided_with);
    let twice = decide(&mut root, &asked.approval_id, "").await.unwrap_err();
    assert_eq!(twice.code(), Code::FailedPrecondition);
    assert!(twice.message().contains("approved by user:ann"), "{twice}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_principal_finds_nothing() {
    let server = TestServer::start().await;
    let mut ann = server.with_key(&server.key("ann").await).await;
    let mut bob = server.with_key(&server.key("bob").await).await;
    let id = session(&mut ann).await;
    let asked = ask(&mut ann, &id).await.unwrap();
    let nobodys = "approval-aaaaaaaaaaaaaaaaaaaa";
    for id in [asked.approval_id.as_str(), nobodys] {
        let gone = format!("approval {id} not found");
        let waited = wait(&bob, id).await.unwrap_err();
        let decided = decide(&mut bob, id, "").await.unwrap_err();
        for refused in [waited, decided] {
            assert_eq!(refused.code(), Code::NotFound);
            assert_eq!(refused.message(), gone);
        }
    }
    let refused = ask(&mut bob, &id).await.unwrap_err();
    assert_eq!(refused.message(), format!("session {id} not found"));
    let all = v1::ListApprovalsRequest {
        session_id: String::new(),
        all: true,
    };
    let mut lists = Vec::new();
    for client in [&mut ann, &mut bob, &mut server.local().await] {
        let listed = client.approvals.list_approvals(all.clone()).await;
        lists.push(listed.unwrap().into_inner().approvals.len());
    }
    assert_eq!(lists, [1, 0, 1]);
    let of_anns = v1::ListApprovalsRequest {
        session_id: id.clone(),
        all: true,
    };
    let refused = bob.approvals.list_approvals(of_anns).await.unwrap_err();
    assert_eq!(refused.message(), format!("session {id} not found"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_ends_with_the_server_and_goes_on_with_the_next() {
    let server = TestServer::start().await;
    let key = server.key("ann").await;
    let mut ann = server.with_key(&key).await;
    let id = session(&mut ann).await;
    let asked = ask(&mut ann, &id).await.unwrap().approval_id;
    let waiting = tokio::spawn({
        let (ann, asked) = (ann.clone(), asked.clone());
        async move { wait(&ann, &asked).await }
    });
    // Sent before the server is asked to stop.
    wait_for_waiter(&server, &waiting).await;
    let server = server.restart().await;
    let ended = waiting.await.unwrap().unwrap_err();
    assert_eq!(ended.code(), Code::Unavailable, "{ended}");
    let ann = server.with_key(&key).await;
    let mut root = server.local().await;
    let (waited, decided) = tokio::join!(wait(&ann, &asked), decide(&mut root, &asked, ""));
    decided.unwrap();
    assert_eq!(waited.unwrap().state, "approved");
}

/// A call after it has been answered: then that one has come too, on the same machine at least.
async fn wait_for_waiter<T>(server: &TestServer, waiting: &tokio::task::JoinHandle<T>) {
    tokio::task::yield_now().await;
    let mut local = server.local().await;
    local.get_status(v1::GetStatusRequest {}).await.unwrap();
    assert!(!waiting.is_finished());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_question_is_refused() {
    let server = TestServer::start().await;
    let mut local = server.local().await;
    let id = session(&mut local).await;
    for (action, expires_in_ms) in [
        ("", 0),
        ("\u{1b}[2J", 0),
        (&"x".repeat(4097), 0),
        ("x", 86_400_001),
    ] {
        let request = v1::RequestApprovalRequest {
            session_id: id.clone(),
            action: action.to_owned(),
            expires_in_ms,
        };
        let refused = local.approvals.request_approval(request).await;
        assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
    }
    let refused = wait(&local, "../x").await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}
