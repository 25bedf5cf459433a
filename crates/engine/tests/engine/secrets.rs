//! Secrets: in the environment of their owner's commands, and nowhere else.

use super::*;
use k8e_engine::SecretOwner;
use k8e_model::{KeyId, SecretName, SecretRef, SecretValue, Tenants};
use std::collections::BTreeMap;

const PLAIN: &str = "hunter2-hunter2-hunter2";

fn name(text: &str) -> SecretName {
    SecretName::new(text, "").unwrap()
}

fn value(text: &str) -> SecretValue {
    SecretValue::new(text.as_bytes().to_vec()).unwrap()
}

fn with_secret(id: &str) -> SessionSpec {
    let wanted = SecretRef {
        secret: name("pw"),
        env_var: "PASSWORD".to_owned(),
    };
    SessionSpec {
        secrets: vec![wanted].try_into().unwrap(),
        ..spec(id)
    }
}

async fn set(server: &Server, who: &Principal, text: &str) {
    let owner = SecretOwner::Caller;
    server
        .sessions
        .set_secret(who, &owner, &name("pw"), &value(text))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_command_gets_the_current_value() {
    let server = Server::start().await;
    set(&server, &me(), PLAIN).await;
    server
        .sessions
        .create(&me(), with_secret("s"))
        .await
        .unwrap();
    let script = "printf %s \"$PASSWORD\" | sha256sum | cut -c1-8; echo ${#PASSWORD}";
    let (first, _) = server.run("s", script).await.unwrap();
    assert!(
        first.ends_with(b"\n23\n"),
        "{}",
        String::from_utf8_lossy(&first)
    );
    set(&server, &me(), "new").await;
    let (second, _) = server.run("s", "echo $PASSWORD").await.unwrap();
    assert_eq!(second, b"new\n");

    let server = server.restart().await;
    let (third, _) = server.run("s", "echo $PASSWORD").await.unwrap();
    assert_eq!(third, b"new\n");
}

#[tokio::test]
async fn precedence_is_session_secret_command() {
    let server = Server::start().await;
    set(&server, &me(), "secret").await;
    let plain: BTreeMap<_, _> = [("PASSWORD".to_owned(), "plain".to_owned())].into();
    let with_env = SessionSpec {
        env: plain.clone().try_into().unwrap(),
        ..with_secret("s")
    };
    server.sessions.create(&me(), with_env).await.unwrap();
    assert_eq!(
        server.run("s", "echo $PASSWORD").await.unwrap().0,
        b"secret\n"
    );
    let mut command = sh("echo $PASSWORD");
    command.env = plain.try_into().unwrap();
    let request = RunRequest {
        target: RunTarget::Existing(sid("s")),
        command,
    };
    let run = server.sessions.run(&me(), request).await.unwrap();
    assert_eq!(finish(run).await.unwrap().0, b"plain\n");
}

#[tokio::test]
async fn secrets_of_other_owners_are_not_found() {
    let server = Server::start().await;
    set(&server, &other(), PLAIN).await;
    assert!(
        server
            .sessions
            .list_secrets(&me())
            .await
            .unwrap()
            .is_empty()
    );
    refused(
        server
            .sessions
            .delete_secret(&me(), &SecretOwner::Caller, &name("pw"), true)
            .await,
        Code::NotFound,
        "not found",
    );
    server
        .sessions
        .create(&me(), with_secret("s"))
        .await
        .unwrap();
    refused(
        server.run("s", "true").await,
        Code::Precondition,
        "secret pw:value for variable PASSWORD not found",
    );
    let of = SecretOwner::Of("ann".parse().unwrap());
    refused(
        server
            .sessions
            .set_secret(&me(), &of, &name("x"), &value("x"))
            .await,
        Code::Denied,
        "socket",
    );
}

#[tokio::test]
async fn an_administrator_sets_them_for_others_and_sees_no_value() {
    let server = Server::start().await;
    let root = Principal::local();
    let of = SecretOwner::Of("ann".parse().unwrap());
    server
        .sessions
        .set_secret(&root, &of, &name("pw"), &value(PLAIN))
        .await
        .unwrap();
    let listed = server.sessions.list_secrets(&root).await.unwrap();
    assert_eq!(listed[0].owner, "user:ann");
    let ann = Principal::user(&"ann".parse().unwrap(), KeyId::random(), Tenants::any());
    server
        .sessions
        .create(&ann, with_secret("s"))
        .await
        .unwrap();
    // The owner's secret, whichever principal runs the command.
    let request = RunRequest {
        target: RunTarget::Existing(sid("s")),
        command: sh("echo ${#PASSWORD}"),
    };
    let run = server.sessions.run(&root, request).await.unwrap();
    assert_eq!(finish(run).await.unwrap().0, b"23\n");
}

#[tokio::test]
async fn a_value_is_in_no_record() {
    let server = Server::start().await;
    set(&server, &me(), PLAIN).await;
    let view = server
        .sessions
        .create(&me(), with_secret("s"))
        .await
        .unwrap();
    assert!(!format!("{view:?}").contains(PLAIN));
    server.run("s", "test -n \"$PASSWORD\"").await.unwrap();
    let missing = argv(&["no-such-program"]);
    let request = RunRequest {
        target: RunTarget::Existing(sid("s")),
        command: missing,
    };
    assert!(server.sessions.run(&me(), request).await.is_err());
    let events = server
        .sessions
        .events(&me(), &sid("s"), 0, 0)
        .await
        .unwrap();
    assert!(!format!("{events:?}").contains(PLAIN));
    let audit = server
        .sessions
        .audit(&Principal::local(), &Default::default())
        .await;
    assert!(!format!("{audit:?}").contains(PLAIN));
    server.sessions.shutdown().await;
    server.store.close().await;
    for file in ["k8e.db", "k8e.db-wal"] {
        let bytes = std::fs::read(server.dir.path().join(file)).unwrap_or_default();
        let found = bytes
            .windows(PLAIN.len())
            .any(|window| window == PLAIN.as_bytes());
        assert!(!found, "{file}");
    }
}

#[tokio::test]
async fn sessions_with_and_without_secrets_are_not_reused_for_each_other() {
    let server = Server::start().await;
    set(&server, &me(), PLAIN).await;
    let run = async |spec: SessionSpec| {
        let spec = SessionSpec { id: None, ..spec };
        let target = RunTarget::Tenant(spec);
        let command = sh("true");
        let run = server
            .sessions
            .run(&me(), RunRequest { target, command })
            .await
            .unwrap();
        let id = run.session_id.clone();
        finish(run).await.unwrap();
        id
    };
    let plain = run(SessionSpec::default()).await;
    let secret = run(with_secret("x")).await;
    assert_ne!(plain, secret);
    assert_eq!(run(with_secret("x")).await, secret);
    // Nor does one without use a session with.
    assert_eq!(run(SessionSpec::default()).await, plain);
}
