//! Certificates: issued for a key, used in its place, revoked with it; and the server's own.

use crate::identity::status;
use crate::server::TestServer;
use k8e_api::client::{Client, ClientIdentity};
use k8e_api::v1;
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tonic::{Code, Status};

/// Logs in as whoever `client` is, with a new pair of keys.
pub(crate) async fn login(
    client: &mut Client,
) -> Result<(ClientIdentity, v1::LoginResponse), Status> {
    let key = KeyPair::generate().unwrap();
    let csr = CertificateParams::default()
        .serialize_request(&key)
        .unwrap();
    let request = v1::LoginRequest {
        csr: csr.pem().unwrap(),
        device_name: "laptop".to_owned(),
        client_version: String::new(),
    };
    let given = client.identity.login(request).await?.into_inner();
    let identity = ClientIdentity {
        cert_pem: given.cert.clone().into_bytes(),
        key_pem: key.serialize_pem().into_bytes(),
    };
    Ok((identity, given))
}

pub(crate) async fn with(server: &TestServer, identity: &ClientIdentity) -> Client {
    let endpoint = server.endpoint(Some(identity.clone()), None);
    Client::connect(&endpoint).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_buys_a_certificate_that_is_as_good() {
    let server = TestServer::start().await;
    let key = server.key("ann").await;
    let (identity, given) = login(&mut server.with_key(&key).await).await.unwrap();
    assert_eq!(given.valid_days, 90);
    let ca = std::fs::read_to_string(server.admin_dir().join("ca.crt")).unwrap();
    assert_eq!(given.ca_cert, ca);

    let mut client = with(&server, &identity).await;
    let create = v1::CreateSessionRequest::default();
    let made = client.create_session(create).await.unwrap().into_inner();
    assert_eq!(made.owner, "user:ann");
    let get = v1::GetSessionRequest {
        session_id: made.session_id,
    };
    server.with_key(&key).await.get_session(get).await.unwrap();

    // It is renewed without the key.
    let (renewed, _) = login(&mut client).await.unwrap();
    status(&mut with(&server, &renewed).await).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_taken_back_with_its_key_and_cannot_buy_another() {
    let server = TestServer::start().await;
    let key = server.key("ann").await;
    let (identity, _) = login(&mut server.with_key(&key).await).await.unwrap();
    let mut client = with(&server, &identity).await;
    status(&mut client).await.unwrap();
    let begun = Instant::now();
    server.delete_key("ann").await;
    let refused = status(&mut client).await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(1));
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("has been revoked"), "{refused}");
    assert!(login(&mut client).await.is_err(), "on the open connection");
    assert!(login(&mut with(&server, &identity).await).await.is_err());
    assert!(login(&mut server.with_key(&key).await).await.is_err());

    let server = server.restart().await;
    assert!(status(&mut with(&server, &identity).await).await.is_err());
    assert!(login(&mut with(&server, &identity).await).await.is_err());
    assert!(login(&mut server.with_key(&key).await).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn one_lost_device_is_not_the_key() {
    let server = TestServer::start().await;
    let key = server.key("ann").await;
    let (lost, _) = login(&mut server.with_key(&key).await).await.unwrap();
    let (kept, _) = login(&mut server.with_key(&key).await).await.unwrap();
    let mut local = server.local().await;
    let audit = local
        .identity
        .list_audit(v1::ListAuditRequest::default())
        .await;
    let rows = audit.unwrap().into_inner().rows;
    let first = rows.iter().find(|row| row.action == "login").unwrap();
    assert_eq!(
        (first.principal.as_str(), first.code.as_str()),
        ("user:ann", "ok")
    );
    assert!(first.key_id.starts_with("key-"), "{first:?}");
    assert_eq!(first.source, "127.0.0.1");
    let (serial, device) = first.object.split_once(' ').unwrap();
    assert_eq!(device, "laptop");
    let mut lost_client = with(&server, &lost).await;
    status(&mut lost_client).await.unwrap();
    let request = v1::RevokeCertificateRequest {
        serial: serial.to_owned(),
    };
    local.identity.revoke_certificate(request).await.unwrap();
    assert!(status(&mut lost_client).await.is_err());
    assert!(login(&mut lost_client).await.is_err());
    status(&mut with(&server, &kept).await).await.unwrap();
    let server = server.restart().await;
    assert!(status(&mut with(&server, &lost).await).await.is_err());
    status(&mut with(&server, &kept).await).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_no_key_cannot_log_in() {
    let server = TestServer::trusting_loopback().await;
    let admin = server.remote(Some(&server.admin_dir())).await.unwrap();
    let loopback = server.remote(None).await.unwrap();
    for mut client in [admin, loopback, server.local().await] {
        let refused = login(&mut client).await.err().unwrap();
        assert_eq!(refused.code(), Code::PermissionDenied);
        assert!(refused.message().contains("missing API key"), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_request_for_a_certificate_says_so() {
    let server = TestServer::start().await;
    let mut client = server.with_key(&server.key("ann").await).await;
    for csr in ["", "garbage", &"x".repeat(20_000)] {
        let request = v1::LoginRequest {
            csr: csr.to_owned(),
            ..Default::default()
        };
        let refused = client.identity.login(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }
}

/// The certificate that a new connection is shown.
async fn shown(server: &TestServer) -> Vec<u8> {
    let mut roots = rustls::RootCertStore::empty();
    let ca = CertificateDer::from_pem_file(server.admin_dir().join("ca.crt")).unwrap();
    roots.add(ca).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let address = server.tcp().unwrap();
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let name = ServerName::from(address.ip());
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = connector.connect(name, stream).await.unwrap();
    let chain = stream.get_ref().1.peer_certificates().unwrap();
    chain[0].to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_servers_certificate_changes_under_open_connections() {
    let server = TestServer::start().await;
    let key = server.key("ann").await;
    let mut client = server.with_key(&key).await;
    status(&mut client).await.unwrap();
    let before = shown(&server).await;
    assert_eq!(shown(&server).await, before);
    // As if it were near its end, or of other names.
    std::fs::remove_file(server.tls_dir().join("sandbox-server.crt")).unwrap();
    let changed = async {
        while shown(&server).await == before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(crate::server::SOON, changed)
        .await
        .unwrap();
    status(&mut client).await.unwrap();
    status(&mut server.with_key(&key).await).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_servers_certificate_has_every_name_of_a_loopback() {
    let server = TestServer::start().await;
    let port = server.tcp().unwrap().port();
    let ca_pem = std::fs::read(server.admin_dir().join("ca.crt")).unwrap();
    let key = server.key("ann").await;
    for name in ["localhost", "127.0.0.1"] {
        let endpoint = k8e_api::client::Endpoint::Tls(k8e_api::client::TlsEndpoint {
            authority: format!("{name}:{port}"),
            ca_pem: ca_pem.clone(),
            identity: None,
            api_key: Some(key.clone()),
        });
        status(&mut Client::connect(&endpoint).await.unwrap())
            .await
            .unwrap();
    }
}
