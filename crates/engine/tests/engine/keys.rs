//! API keys and client certificates: authentication, expiry, revocation.

use super::*;
use k8e_engine::{Certificate, NewKey};
use k8e_model::{ApiKey, KeyId};

fn new_key(name: &str) -> NewKey {
    NewKey {
        name: name.parse().unwrap(),
        principal: None,
        tenants: None,
        expires_in: None,
    }
}

fn root() -> Principal {
    Principal::local()
}

fn certificate(serial: &str, key: Option<&KeyId>) -> Certificate {
    Certificate {
        serial: serial.to_owned(),
        common_name: "ann".to_owned(),
        ends_at: i64::MAX,
        key: key.cloned(),
    }
}

#[tokio::test]
async fn a_key_is_its_principal_until_it_is_deleted_and_after_a_restart() {
    let server = Server::start().await;
    let (view, key) = server
        .sessions
        .create_key(&root(), new_key("ann"))
        .await
        .unwrap();
    let (who, id) = server.sessions.verify_key(&key).unwrap();
    assert_eq!((who.name(), &id), ("user:ann", &view.id));
    assert!(!who.is_operator());

    let server = server.restart().await;
    assert_eq!(server.sessions.verify_key(&key).unwrap().0, who);
    assert!(
        server.sessions.list_keys(&root()).unwrap()[0]
            .last_used
            .is_some()
    );
    let mut changed = server.sessions.credentials();
    server
        .sessions
        .delete_key(&root(), view.id.as_str())
        .await
        .unwrap();
    refused(
        server.sessions.verify_key(&key),
        Code::Unauthenticated,
        "invalid API key",
    );
    assert!(changed.has_changed().unwrap());
    changed.mark_unchanged();
    refused(
        server.sessions.delete_key(&root(), view.id.as_str()).await,
        Code::NotFound,
        "not found",
    );

    let server = server.restart().await;
    refused(
        server.sessions.verify_key(&key),
        Code::Unauthenticated,
        "invalid API key",
    );
    assert!(server.sessions.list_keys(&root()).unwrap().is_empty());
}

#[tokio::test]
async fn several_keys_may_have_one_principal() {
    let server = Server::start().await;
    let new = NewKey {
        principal: Some("ann".parse().unwrap()),
        ..new_key("laptop")
    };
    let (_, laptop) = server.sessions.create_key(&root(), new).await.unwrap();
    let (_, own) = server
        .sessions
        .create_key(&root(), new_key("ann"))
        .await
        .unwrap();
    let verify = |key| server.sessions.verify_key(key).unwrap().0;
    assert_eq!(verify(&laptop).name(), verify(&own).name());
    refused(
        server.sessions.create_key(&root(), new_key("ann")).await,
        Code::Exists,
        "exists already",
    );
    // By name, as in the Go K8E.
    server.sessions.delete_key(&root(), "laptop").await.unwrap();
    assert!(server.sessions.verify_key(&laptop).is_err());
    verify(&own);
}

#[tokio::test]
async fn an_expired_key_is_refused() {
    let server = Server::start().await;
    let new = NewKey {
        // Long enough to be used before, on a busy machine.
        expires_in: Some(Duration::from_secs(3)),
        ..new_key("short")
    };
    let (view, key) = server.sessions.create_key(&root(), new).await.unwrap();
    server.sessions.verify_key(&key).unwrap();
    let given = certificate("ab", Some(&view.id));
    server.sessions.verify_certificate(&given).unwrap();
    let over = Certificate {
        ends_at: 1,
        ..given.clone()
    };
    refused(
        server.sessions.verify_certificate(&over),
        Code::Unauthenticated,
        "expired",
    );
    while server.sessions.verify_key(&key).is_ok() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    refused(
        server.sessions.verify_key(&key),
        Code::Unauthenticated,
        "invalid API key",
    );
    refused(
        server.sessions.verify_certificate(&given),
        Code::Denied,
        "revoked",
    );
    assert!(server.sessions.valid_key(&view.id).is_err());
    assert!(server.sessions.list_keys(&root()).unwrap()[0].expired);
}

#[tokio::test]
async fn a_certificate_is_valid_as_long_as_its_key() {
    let server = Server::start().await;
    let (view, _) = server
        .sessions
        .create_key(&root(), new_key("ann"))
        .await
        .unwrap();
    let given = certificate("ab", Some(&view.id));
    let who = server.sessions.verify_certificate(&given).unwrap();
    assert_eq!(who.name(), "user:ann");
    server.sessions.delete_key(&root(), "ann").await.unwrap();
    refused(
        server.sessions.verify_certificate(&given),
        Code::Denied,
        "revoked",
    );
    let server = server.restart().await;
    refused(
        server.sessions.verify_certificate(&given),
        Code::Denied,
        "revoked",
    );
}

#[tokio::test]
async fn one_certificate_can_be_revoked() {
    let server = Server::start().await;
    let admin = certificate("1f2e", None);
    let who = server.sessions.verify_certificate(&admin).unwrap();
    assert_eq!(who.name(), "cert:ann");
    server
        .sessions
        .revoke_certificate(&root(), "00:1F:2E")
        .await
        .unwrap();
    refused(
        server.sessions.verify_certificate(&admin),
        Code::Denied,
        "revoked",
    );
    server
        .sessions
        .verify_certificate(&certificate("1f2f", None))
        .unwrap();
    let server = server.restart().await;
    refused(
        server.sessions.verify_certificate(&admin),
        Code::Denied,
        "revoked",
    );
    for bad in ["", "0", "xyz", &"1".repeat(41)] {
        refused(
            server.sessions.revoke_certificate(&root(), bad).await,
            Code::Invalid,
            "hexadecimal",
        );
    }
}

#[tokio::test]
async fn only_administrators_manage_keys() {
    let server = Server::start().await;
    for who in [me(), Principal::loopback()] {
        let sessions = &server.sessions;
        refused(
            sessions.create_key(&who, new_key("x")).await,
            Code::Denied,
            "socket",
        );
        refused(sessions.list_keys(&who), Code::Denied, "socket");
        refused(sessions.delete_key(&who, "x").await, Code::Denied, "socket");
        refused(
            sessions.revoke_certificate(&who, "1").await,
            Code::Denied,
            "socket",
        );
        refused(
            sessions.audit(&who, &Default::default()).await,
            Code::Denied,
            "socket",
        );
    }
}

#[tokio::test]
async fn a_key_is_deleted_even_when_the_store_fails() {
    let server = Server::start().await;
    let (_, key) = server
        .sessions
        .create_key(&root(), new_key("ann"))
        .await
        .unwrap();
    server.store.close().await;
    assert!(server.sessions.delete_key(&root(), "ann").await.is_err());
    assert!(server.sessions.verify_key(&key).is_err());
}

#[tokio::test]
async fn a_guessed_key_is_refused() {
    let server = Server::start().await;
    server
        .sessions
        .create_key(&root(), new_key("ann"))
        .await
        .unwrap();
    for _ in 0..1000 {
        assert!(server.sessions.verify_key(&ApiKey::random()).is_err());
    }
}
