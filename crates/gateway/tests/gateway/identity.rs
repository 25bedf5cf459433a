//! Authentication over TLS by API key and by certificate; rate limits.

use crate::server::{SOON, TestServer};
use k8e_api::client::{Client, Endpoint};
use k8e_api::status::retry_after;
use k8e_api::v1;
use k8e_gateway::{Rate, RateLimits};
use std::time::{Duration, Instant};
use tonic::{Code, Status};

/// Runs a client as a user without privileges: on this machine root may be let in without a certificate.
pub(crate) async fn as_nobody<T: Send + 'static>(
    work: impl AsyncFnOnce() -> T + Send + 'static,
) -> T {
    assert!(
        rustix::process::geteuid().is_root(),
        "this test needs root: run it as CI does"
    );
    let (done, result) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        // Of this thread alone.
        let nobody = rustix::fs::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let _ = done.send(runtime.block_on(work()));
    });
    result.await.unwrap()
}

pub(crate) async fn status(client: &mut Client) -> Result<(), Status> {
    client.get_status(v1::GetStatusRequest {}).await.map(drop)
}

pub(crate) async fn owner(client: &mut Client) -> String {
    let create = v1::CreateSessionRequest::default();
    client
        .create_session(create)
        .await
        .unwrap()
        .into_inner()
        .owner
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_with_every_call_is_enough() {
    let server = TestServer::start().await;
    let key = server.key("ann").await;
    let endpoint = server.endpoint(None, Some(key.clone()));
    let owned = as_nobody(async move || {
        let mut client = Client::connect(&endpoint).await.unwrap();
        owner(&mut client).await
    });
    assert_eq!(owned.await, "user:ann");
    // A key says more than the kernel, and more than a certificate.
    let mut root = server.with_key(&key).await;
    assert_eq!(owner(&mut root).await, "user:ann");
    let other = TestServer::start().await;
    let wrong = other.key("ann").await;
    let refused = status(&mut server.with_key(&wrong).await)
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    assert!(refused.message().starts_with("invalid API key"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_key_is_refused_at_once_and_for_ever() {
    let server = TestServer::start().await;
    let key = server.key("ann").await;
    let mut client = server.with_key(&key).await;
    status(&mut client).await.unwrap();
    server.delete_key("ann").await;
    // On the connection that is open, and on a new one.
    for client in [&mut client, &mut server.with_key(&key).await] {
        let refused = status(client).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
    }
    let server = server.restart().await;
    let refused = status(&mut server.with_key(&key).await).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_key_is_refused() {
    let server = TestServer::start().await;
    let request = v1::CreateKeyRequest {
        name: "short".to_owned(),
        // Long enough to be used once before, on a busy machine.
        expires_in_s: 3,
        ..Default::default()
    };
    let made = server.local().await.identity.create_key(request).await;
    let key = k8e_model::ApiKey::parse(&made.unwrap().into_inner().secret).unwrap();
    let mut client = server.with_key(&key).await;
    status(&mut client).await.unwrap();
    let expires = async {
        loop {
            match status(&mut client).await {
                Ok(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                Err(refused) => break refused,
            }
        }
    };
    let refused = tokio::time::timeout(crate::server::SOON, expires)
        .await
        .unwrap();
    assert_eq!(refused.code(), Code::Unauthenticated);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_under_way_ends_with_its_key() {
    let server = TestServer::start().await;
    let key = server.key("ann").await;
    let mut client = server.with_key(&key).await;
    let sleep = v1::RunStart {
        program: Some(v1::run_start::Program::Argv(v1::Argv {
            args: vec!["sleep".into(), "600".into()],
        })),
        cwd: "/tmp".to_owned(),
        timeout_ms: -1,
        ..Default::default()
    };
    let start = v1::RunRequest {
        message: Some(v1::run_request::Message::Start(sleep)),
    };
    let messages = tokio_stream::iter([start]);
    let mut events = client.run(messages).await.unwrap().into_inner();
    events.message().await.unwrap().unwrap();
    let begun = Instant::now();
    server.delete_key("ann").await;
    let end = tokio::time::timeout(SOON, events.message()).await.unwrap();
    assert_eq!(end.unwrap_err().code(), Code::Unauthenticated);
    assert!(
        begun.elapsed() < Duration::from_secs(1),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_another_authority_is_not_believed() {
    let server = TestServer::start().await;
    let other = TestServer::start().await;
    let Endpoint::Tls(mut endpoint) = server.endpoint(None, None) else {
        panic!("it is TLS");
    };
    endpoint.ca_pem = std::fs::read(other.admin_dir().join("ca.crt")).unwrap();
    assert!(Client::connect(&Endpoint::Tls(endpoint)).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn rates_are_each_principals_own_and_reads_and_writes_apart() {
    let slow = Rate {
        per_second: 1,
        burst: 5,
    };
    let server = TestServer::limited(RateLimits {
        reads: slow,
        writes: slow,
    })
    .await;
    let (ann, bob) = (server.key("ann").await, server.key("bob").await);
    let mut anns = server.with_key(&ann).await;
    let mut refused = None;
    for _ in 0..10 {
        refused = refused.or(status(&mut anns).await.err());
    }
    let refused = refused.unwrap();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(retry_after(&refused).is_some());
    assert!(refused.message().contains("rate limit exceeded"));
    // Writes are counted apart, others are not touched, and root is not counted.
    owner(&mut anns).await;
    status(&mut server.with_key(&bob).await).await.unwrap();
    let mut local = server.local().await;
    for _ in 0..20 {
        status(&mut local).await.unwrap();
    }
    tokio::time::sleep(retry_after(&refused).unwrap()).await;
    status(&mut anns).await.unwrap();
}
