//! Port 443.

use super::*;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpStream;

async fn allowed(allow: &[&str], deny: &[&str], said: &[u8]) -> String {
    let stage = Stage::open(policy(allow, deny), TLS, echo().await).await;
    stage.tell("a.example", ADDRESS);
    let mut stream = stage.connect().await;
    stream.write_all(said).await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(read_all(&mut stream).await.unwrap(), said);
    stage.flow().await
}

#[tokio::test]
async fn an_allowed_name_with_its_address() {
    let want = "allowed a.example 93.184.215.14:443 a.example";
    assert_eq!(allowed(&["a.example"], &[], &hello("a.example")).await, want);
    let large = hello_with("a.example", |config| {
        config.alpn_protocols = vec![vec![b'x'; 250]; 150];
    });
    assert_eq!(allowed(&["a.example"], &[], &large).await, want);
    let want = "allowed a.example 93.184.215.14:443 *.example";
    assert_eq!(allowed(&["*.example"], &[], &hello("a.example")).await, want);
}

#[tokio::test]
async fn under_all_a_name_is_looked_at_where_one_is_denied() {
    let deny = &["b.example"];
    let want = "allowed a.example 93.184.215.14:443 all";
    assert_eq!(allowed(&["all"], deny, &hello("a.example")).await, want);
    let want = "allowed - 93.184.215.14:443 all";
    assert_eq!(allowed(&["all"], deny, &hello("192.0.2.1")).await, want);
    assert_eq!(allowed(&["all"], deny, b"SSH-2.0-on-443\r\n").await, want);
    let want = "deny_list b.example 93.184.215.14:443 b.example";
    assert_eq!(denied(&["all"], deny, TLS, &[], &hello("b.example")).await, want);
    assert_eq!(denied(&["93.184.0.0/16"], deny, TLS, &[], &hello("b.example")).await, want);
    let cut = &hello("a.example")[..20];
    let stage = Stage::open(policy(&["all"], deny), TLS, nobody().await).await;
    let mut stream = stage.connect().await;
    stream.write_all(cut).await.unwrap();
    stream.shutdown().await.unwrap();
    assert!(is_reset(&read_all(&mut stream).await));
    assert_eq!(stage.flow().await, "malformed - 93.184.215.14:443 -");
}

#[tokio::test]
async fn everything_else_is_denied() {
    let told = &["a.example", "b.example"];
    let hidden = hello_of(&[sni(b"a.example"), (0xfe0d, vec![0; 64])]);
    let two = hello_of(&[sni(b"a.example"), sni(b"b.example")]);
    for (said, want) in [
        (hello("b.example"), "not_allowed b.example 93.184.215.14:443 -"),
        (hello("192.0.2.1"), "no_name - 93.184.215.14:443 -"),
        (hello_of(&[]), "no_name - 93.184.215.14:443 -"),
        (hello_of(&[sni(b"93.184.215.14")]), "no_name - 93.184.215.14:443 -"),
        (hidden, "encrypted_hello a.example 93.184.215.14:443 -"),
        (two, "malformed - 93.184.215.14:443 -"),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n".to_vec(), "malformed - 93.184.215.14:443 -"),
        (vec![22, 3, 1, 0, 0], "malformed - 93.184.215.14:443 -"),
    ] {
        assert_eq!(denied(&["a.example"], &[], TLS, told, &said).await, want);
    }
    // Allowed, but the address is not one that anybody said it has.
    let want = "unresolved a.example 93.184.215.14:443 -";
    assert_eq!(denied(&["a.example"], &[], TLS, &["b.example"], &hello("a.example")).await, want);
    let want = "port_closed a.example 93.184.215.14:443 -";
    assert_eq!(denied(&["a.example:22"], &[], TLS, told, &hello("a.example")).await, want);
}

#[tokio::test]
async fn a_slow_hello_arrives() {
    let stage = Stage::open(policy(&["a.example"], &[]), TLS, echo().await).await;
    stage.tell("a.example", ADDRESS);
    let mut stream = stage.connect().await;
    let said = hello("a.example");
    for piece in said.chunks(7) {
        stream.write_all(piece).await.unwrap();
        sleep(Duration::from_millis(2)).await;
    }
    let mut echoed = vec![0; said.len()];
    stream.read_exact(&mut echoed).await.unwrap();
    assert_eq!(echoed, said);
}

#[tokio::test(start_paused = true)]
async fn who_says_too_little_is_not_waited_for() {
    for (said, want) in [(&b""[..], "no_name"), (&[22, 3, 1], "malformed")] {
        let flow = denied(&["a.example"], &[], TLS, &[], said).await;
        assert_eq!(flow, format!("{want} - 93.184.215.14:443 -"));
    }
}

#[tokio::test]
async fn who_leaves_without_a_word_is_written_down() {
    let stage = Stage::open(policy(&["a.example"], &[]), TLS, nobody().await).await;
    drop(stage.connect().await);
    assert_eq!(stage.flow().await, "no_name - 93.184.215.14:443 -");
}

#[tokio::test]
async fn a_cut_by_name() {
    let stage = Stage::open(policy(&["a.example", "b.example"], &[]), TLS, echo().await).await;
    stage.tell("a.example", ADDRESS);
    let mut stream = stage.connect().await;
    let said = hello("a.example");
    stream.write_all(&said).await.unwrap();
    stream.read_exact(&mut vec![0; said.len()]).await.unwrap();
    stage.ward.set_policy(policy(&["b.example"], &[]));
    assert!(is_reset(&read_all(&mut stream).await));
    let flows = stage.flows(2).await;
    assert_eq!(text(&flows[1]), "policy_changed a.example 93.184.215.14:443 -");
}

/// What a server says that wants another hello: enough of it.
fn retry() -> Vec<u8> {
    let mut body = vec![2, 0, 0, 40, 3, 3];
    body.extend(crate::tcp::opening::RETRY);
    body.extend([0; 6]);
    record(&body)
}

/// Asks for another hello, and says back what comes then.
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
    // What comes second is sent with the first: nothing may reach the server before it is checked.
    stream.write_all(&[&first, bytes].concat()).await.unwrap();
    let mut answer = vec![0; retry().len()];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, retry());
    let _ = stream.shutdown().await;
    let rest = read_all(&mut stream).await;
    (stage, rest)
}

#[tokio::test]
async fn a_second_hello_must_have_the_same_name() {
    let same = hello_of(&[(16, vec![0, 3, 2, b'h', b'2']), sni(b"a.example")]);
    let ccs = [20, 3, 3, 0, 1, 1];
    let early = [23, 3, 3, 0, 4, 1, 2, 3, 4];
    for said in [same.clone(), [&ccs[..], &same].concat(), [&early[..], &ccs, &same].concat()] {
        let (stage, rest) = second(&said).await;
        assert_eq!(rest.unwrap(), said);
        assert_eq!(stage.flow().await, "allowed a.example 93.184.215.14:443 a.example");
    }
    let other = hello_of(&[sni(b"b.example")]);
    let hidden = hello_of(&[sni(b"a.example"), (0xfe0d, vec![0; 9])]);
    let none = hello_of(&[]);
    for said in [&other[..], &[&ccs[..], &other].concat(), &hidden, &none, b"GET", &[22, 9]] {
        let (stage, rest) = second(said).await;
        assert!(is_reset(&rest), "{said:x?} {rest:?}");
        let flows = stage.flows(2).await;
        assert!(text(&flows[1]).starts_with("malformed"), "{flows:?}");
    }
}

/// A client and a server that speak real TLS through the gate. The client offers a key that the
/// server does not take, so that there is a second hello, or one that it does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_tls_with_and_without_a_second_hello() {
    let made = rcgen::generate_simple_self_signed(["a.example".to_owned()]).unwrap();
    for group in [rustls::crypto::ring::kx_group::X25519, rustls::crypto::ring::kx_group::SECP384R1] {
        let server = tls_server(&made, group);
        let stage = Stage::open(policy(&["a.example"], &[]), TLS, server).await;
        stage.tell("a.example", ADDRESS);
        let stream = stage.connect().await.into_std().unwrap();
        stream.set_nonblocking(false).unwrap();
        let certificate = made.cert.der().clone();
        let answer = tokio::task::spawn_blocking(move || {
            let mut roots = RootCertStore::empty();
            roots.add(certificate).unwrap();
            let config = ClientConfig::builder_with_provider(provider(rustls::crypto::ring::ALL_KX_GROUPS.to_vec()))
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
        assert_eq!(timeout(SOON, answer).await.unwrap().unwrap(), format!("{:?}", group.name()));
        assert_eq!(stage.flow().await, "allowed a.example 93.184.215.14:443 a.example");
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
        tls.write_all(format!("{:?}", group.name()).as_bytes()).unwrap();
        tls.conn.send_close_notify();
        tls.flush().unwrap();
    });
    address
}

#[tokio::test]
async fn a_server_that_hangs_up_or_says_no_is_passed_on() {
    for (answer, want) in [(&b""[..], &b""[..]), (&[21, 3, 3, 0, 2, 2, 40], &[21, 3, 3, 0, 2, 2, 40])] {
        let server = server(move |mut stream: TcpStream| async move {
            stream.read_u8().await?;
            stream.write_all(answer).await?;
            stream.shutdown().await?;
            stream.read_to_end(&mut Vec::new()).await.map(|_| ())
        });
        let stage = Stage::open(policy(&["a.example"], &[]), TLS, server.await).await;
        stage.tell("a.example", ADDRESS);
        let mut stream = stage.connect().await;
        stream.write_all(&hello("a.example")).await.unwrap();
        let mut heard = vec![0; want.len()];
        stream.read_exact(&mut heard).await.unwrap();
        assert_eq!(heard, want);
        stream.shutdown().await.unwrap();
        assert!(read_all(&mut stream).await.unwrap().is_empty());
    }
}
