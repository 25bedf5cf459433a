//! Clients over TLS on loopback with neither key nor certificate: refused, unless the server trusts the kernel's word
//! (`--trust-loopback`), and then only for root and the group.

use crate::identity::{as_nobody, owner, status};
use crate::server::TestServer;
use k8e_api::client::{Client, Endpoint};
use k8e_api::v1;
use std::net::SocketAddr;
use tokio::net::{TcpListener, TcpSocket};
use tonic::{Code, Status};

/// The first call of a client that has neither.
async fn refused(endpoint: Endpoint) -> Status {
    let mut client = Client::connect(&endpoint).await.unwrap();
    status(&mut client).await.unwrap_err()
}

/// The same through a relay of a user without privileges, whose socket is bound to `device`. Before the client says anything,
/// root listens on the port from which that connection comes.
async fn refused_by_way_of(server: &TestServer, device: Option<&'static [u8]>) -> Status {
    // Somebody else may have the port at another address.
    for _ in 0..ATTEMPTS {
        let (relay, from) = relay_of_nobody(server.tcp().unwrap(), device).await;
        if let Ok(_roots) = std::net::TcpListener::bind(("0.0.0.0", from.port())) {
            let Endpoint::Tls(mut endpoint) = server.endpoint(None, None) else {
                panic!("it is TLS");
            };
            endpoint.authority = relay.to_string();
            return refused(Endpoint::Tls(endpoint)).await;
        }
    }
    panic!("root cannot listen on the port of any connection");
}

const ATTEMPTS: usize = 100;

/// Where it listens for one connection, and from where it is connected to the server.
async fn relay_of_nobody(
    to: SocketAddr,
    device: Option<&'static [u8]>,
) -> (SocketAddr, SocketAddr) {
    let (told, places) = tokio::sync::oneshot::channel();
    tokio::spawn(as_nobody(async move || {
        let socket = TcpSocket::new_v4().unwrap();
        // Lets somebody else listen on the same port later.
        socket.set_reuseaddr(true).unwrap();
        socket.bind_device(device).unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut there = socket.connect(to).await.unwrap();
        let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let places = (relay.local_addr().unwrap(), there.local_addr().unwrap());
        told.send(places).unwrap();
        let (mut here, _) = relay.accept().await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut here, &mut there).await;
    }));
    places.await.unwrap()
}

fn told_what_to_do(refused: &Status, words: &[&str]) {
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    for word in words {
        let message = refused.message();
        assert!(message.contains(word), "{message:?} does not say {word}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_flag_not_even_root_is_let_in() {
    let server = TestServer::start().await;
    let root = refused(server.endpoint(None, None)).await;
    let endpoint = server.endpoint(None, None);
    let nobody = as_nobody(async move || refused(endpoint).await).await;
    for refused in [root, nobody] {
        let words = [
            "k8e apikey create",
            "k8e login",
            "Unix socket",
            "--trust-loopback",
        ];
        told_what_to_do(&refused, &words);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_flag_root_is_let_in_and_makes_no_keys() {
    let server = TestServer::trusting_loopback().await;
    let mut root = server.remote(None).await.unwrap();
    assert_eq!(owner(&mut root).await, "local");
    // Keys are for the Unix socket.
    let request = v1::CreateKeyRequest {
        name: "x".to_owned(),
        ..Default::default()
    };
    let refused = root.identity.create_key(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_flag_others_are_refused() {
    let server = TestServer::trusting_loopback().await;
    let endpoint = server.endpoint(None, None);
    let nobody = as_nobody(async move || refused(endpoint).await).await;
    told_what_to_do(
        &nobody,
        &["missing API key", "only root and members of the group k8e"],
    );
    let plain = refused_by_way_of(&server, None).await;
    told_what_to_do(&plain, &["missing API key"]);
}

/// The kernel does not find such a socket by its addresses, and answers with root's listener on that port.
#[tokio::test(flavor = "multi_thread")]
async fn a_socket_that_is_bound_to_the_loopback_device_is_refused() {
    let server = TestServer::trusting_loopback().await;
    let refused = refused_by_way_of(&server, Some(b"lo")).await;
    told_what_to_do(&refused, &["missing API key"]);
}
