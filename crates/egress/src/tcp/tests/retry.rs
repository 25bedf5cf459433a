//! Servers that send a HelloRetryRequest.

use super::*;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;

/// The beginning of a HelloRetryRequest.
fn retry() -> Vec<u8> {
    let mut body = vec![2, 0, 0, 40, 3, 3];
    body.extend(crate::tcp::hello_retry::RETRY);
    body.extend([0; 6]);
    record(&body)
}

/// A server that sends a HelloRetryRequest and echoes what follows.
async fn asks_again() -> SocketAddr {
    server(|mut stream| async move {
        let mut first = vec![0; hello_of(&[sni(b"a.example")]).len()];
        stream.read_exact(&mut first).await?;
        stream.write_all(&retry()).await?;
        let (mut read, mut write) = stream.split();
        tokio::io::copy(&mut read, &mut write).await?;
        write.shutdown().await
    })
    .await
}

async fn second(bytes: &[u8]) -> (Stage, io::Result<Vec<u8>>) {
    let stage = Stage::open(policy(&["a.example"], &[]), TLS, asks_again().await).await;
    stage.tell("a.example", ADDRESS);
    let mut stream = stage.connect().await;
    let first = hello_of(&[sni(b"a.example")]);
    // The second ClientHello is sent with the first: it must not reach the server unchecked.
    stream.write_all(&[&first, bytes].concat()).await.unwrap();
    let mut answer = vec![0; retry().len()];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, retry());
    let _ = stream.shutdown().await;
    let rest = read_all(&mut stream).await;
    (stage, rest)
}

#[tokio::test]
async fn a_second_client_hello_must_have_the_same_name() {
    let same = hello_of(&[(16, vec![0, 3, 2, b'h', b'2']), sni(b"a.example")]);
    let ccs = [20, 3, 3, 0, 1, 1];
    let early = [23, 3, 3, 0, 4, 1, 2, 3, 4];
    for said in [
        same.clone(),
        [&ccs[..], &same].concat(),
        [&early[..], &ccs, &same].concat(),
    ] {
        let (stage, rest) = second(&said).await;
        assert_eq!(rest.unwrap(), said);
        assert_eq!(
            stage.flow().await,
            "allowed a.example 93.184.215.14:443 a.example"
        );
    }
    let other = hello_of(&[sni(b"b.example")]);
    let hidden = hello_of(&[sni(b"a.example"), (0xfe0d, vec![0; 9])]);
    let none = hello_of(&[]);
    for said in [
        &other[..],
        &[&ccs[..], &other].concat(),
        &hidden,
        &none,
        b"GET",
        &[22, 9],
    ] {
        let (stage, rest) = second(said).await;
        assert!(is_reset(&rest), "{said:x?} {rest:?}");
        let flows = stage.flows(2).await;
        assert!(text(&flows[1]).starts_with("malformed"), "{flows:?}");
    }
}

/// A TLS client and server (rustls) through the gate, with a key share that the server rejects, which
/// causes a HelloRetryRequest, and with one that it accepts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_tls_with_and_without_hello_retry_request() {
    let made = rcgen::generate_simple_self_signed(["a.example".to_owned()]).unwrap();
    for group in [
        rustls::crypto::ring::kx_group::X25519,
        rustls::crypto::ring::kx_group::SECP384R1,
    ] {
        let server = tls_server(&made, group);
        let stage = Stage::open(policy(&["a.example"], &[]), TLS, server).await;
        stage.tell("a.example", ADDRESS);
        let stream = stage.connect().await.into_std().unwrap();
        stream.set_nonblocking(false).unwrap();
        let certificate = made.cert.der().clone();
        let answer = tokio::task::spawn_blocking(move || {
            let mut roots = RootCertStore::empty();
            roots.add(certificate).unwrap();
            let config = ClientConfig::builder_with_provider(provider(
                rustls::crypto::ring::ALL_KX_GROUPS.to_vec(),
            ))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
            let name = ServerName::try_from("a.example").unwrap();
            let connection = ClientConnection::new(Arc::new(config), name).unwrap();
            let mut tls = rustls::StreamOwned::new(connection, stream);
            tls.write_all(b"hello").unwrap();
            let mut answer = String::new();
            tls.read_to_string(&mut answer).unwrap();
            answer
        });
        assert_eq!(
            timeout(SOON, answer).await.unwrap().unwrap(),
            format!("{:?}", group.name())
        );
        assert_eq!(
            stage.flow().await,
            "allowed a.example 93.184.215.14:443 a.example"
        );
    }
}

fn provider(
    kx_groups: Vec<&'static dyn rustls::crypto::SupportedKxGroup>,
) -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::CryptoProvider {
        kx_groups,
        ..rustls::crypto::ring::default_provider()
    })
}

fn tls_server(
    made: &rcgen::CertifiedKey<rcgen::KeyPair>,
    group: &'static dyn rustls::crypto::SupportedKxGroup,
) -> SocketAddr {
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(provider(vec![group]))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let connection = ServerConnection::new(Arc::new(config)).unwrap();
        let mut tls = rustls::StreamOwned::new(connection, stream);
        let mut said = [0; 5];
        tls.read_exact(&mut said).unwrap();
        tls.write_all(format!("{:?}", group.name()).as_bytes())
            .unwrap();
        tls.conn.send_close_notify();
        tls.flush().unwrap();
    });
    address
}
