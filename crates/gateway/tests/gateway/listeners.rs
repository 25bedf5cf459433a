//! Listeners: which clients are admitted by the Unix socket and by TLS, and bytes that are no protocol.

use crate::server::{SOON, TestServer};
use k8e_api::client::{Client, Endpoint};
use k8e_api::v1;
use k8e_gateway::Tcp;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};
use tonic::Code;

/// Tests of identity change their own: without root they could only pretend.
fn needs_root() {
    assert!(
        rustix::process::geteuid().is_root(),
        "this test needs root: run it as CI does"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn root_enters_by_the_socket() {
    needs_root();
    let server = TestServer::start().await;
    let status = server
        .local()
        .await
        .get_status(v1::GetStatusRequest {})
        .await
        .unwrap();
    assert_eq!(status.into_inner().default_runtime, "native");
    let mode = std::fs::metadata(server.socket())
        .unwrap()
        .permissions()
        .mode()
        & 0o777;
    let want = if k8e_gateway::group_id("k8e").is_some() {
        0o660
    } else {
        0o600
    };
    assert_eq!(mode, want, "{mode:o}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_outside_the_group_is_refused_and_told_what_to_do() {
    needs_root();
    let server = TestServer::start().await;
    // The file's permissions would stop him already: what is tested is the check behind them.
    let socket = server.socket();
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(socket.parent().unwrap(), open.clone()).unwrap();
    std::fs::set_permissions(&socket, open).unwrap();
    let refused = std::thread::spawn(move || {
        // Of this thread alone.
        let nobody = 65534;
        let (uid, gid) = (
            rustix::fs::Uid::from_raw(nobody),
            rustix::fs::Gid::from_raw(nobody),
        );
        rustix::thread::set_thread_groups(&[]).unwrap();
        rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut client = Client::connect(&Endpoint::Unix(socket)).await.unwrap();
            client
                .get_status(v1::GetStatusRequest {})
                .await
                .unwrap_err()
        })
    });
    let refused = refused.join().unwrap();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(
        refused.message().contains("usermod"),
        "{}",
        refused.message()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_must_be_ours() {
    let server = TestServer::start().await;
    let other = TestServer::start().await;
    // TLS 1.3 tells a client of its refusal after the handshake: the first call must fail too.
    if let Ok(mut client) = server.remote(Some(&other.admin_dir())).await {
        assert!(client.get_status(v1::GetStatusRequest {}).await.is_err());
    }
    let mut admin = server.remote(Some(&server.admin_dir())).await.unwrap();
    admin.get_status(v1::GetStatusRequest {}).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_sees_its_own_sessions_and_root_sees_all() {
    needs_root();
    let server = TestServer::start().await;
    let mut local = server.local().await;
    let mut admin = server.remote(Some(&server.admin_dir())).await.unwrap();
    let create = v1::CreateSessionRequest::default();
    let roots = local
        .create_session(create.clone())
        .await
        .unwrap()
        .into_inner();
    let admins = admin.create_session(create).await.unwrap().into_inner();
    assert_eq!(
        (roots.owner.as_str(), admins.owner.as_str()),
        ("local", "cert:admin")
    );

    let get = |id: &str| v1::GetSessionRequest {
        session_id: id.to_owned(),
    };
    local.get_session(get(&admins.session_id)).await.unwrap();
    let hidden = admin.get_session(get(&roots.session_id)).await.unwrap_err();
    assert_eq!(hidden.code(), Code::NotFound);
    assert_eq!(
        hidden.message(),
        format!("session {} not found", roots.session_id)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_address_matters_only_to_who_asked_for_it() {
    needs_root();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let error = TestServer::start_with(Some(Tcp {
        address,
        required: true,
        trust_loopback: false,
    }))
    .await
    .err()
    .unwrap();
    assert!(error.to_string().contains("--listen"), "{error}");
    let server = TestServer::start_with(Some(Tcp {
        address,
        required: false,
        trust_loopback: false,
    }))
    .await
    .unwrap();
    assert_eq!(server.tcp(), None);
    server
        .local()
        .await
        .get_status(v1::GetStatusRequest {})
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_on_a_listener_harms_no_client() {
    needs_root();
    let server = TestServer::start().await;
    let mut unix = std::os::unix::net::UnixStream::connect(server.socket()).unwrap();
    let mut tcp = std::net::TcpStream::connect(server.tcp().unwrap()).unwrap();
    let garbage: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    // It may hang up before everything is said.
    let _ = unix.write_all(&garbage);
    let _ = tcp.write_all(&garbage);
    server
        .local()
        .await
        .get_status(v1::GetStatusRequest {})
        .await
        .unwrap();
    server.remote(Some(&server.admin_dir())).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_client_does_not_delay_a_stop() {
    needs_root();
    let server = TestServer::start().await;
    let mut client = server.local().await;
    client.get_status(v1::GetStatusRequest {}).await.unwrap();
    let socket = server.socket();
    let start = Instant::now();
    server.stop().await.unwrap();
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "{:?}",
        start.elapsed()
    );
    assert!(!socket.exists());
    assert!(start.elapsed() < SOON);
}
