//! TCP forwarding to services in the sandbox.

use crate::support::{Guest, with_guest};
use bytes::Bytes;
use k8e_wire::HostEnd;
use k8e_wire::proto::{End, ErrorCode, Forward, input::Input, reply::Reply, request::Call};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// A service and a connection to it through the guest.
async fn connected(guest: &Guest) -> (TcpStream, HostEnd) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut end = forward(guest, port.into(), "").await;
    let (service, _) = listener.accept().await.unwrap();
    assert!(matches!(next(&mut end).await, Reply::Connected(_)));
    (service, end)
}

async fn forward(guest: &Guest, port: u32, host: &str) -> HostEnd {
    let host = host.to_owned();
    guest.call(Call::Forward(Forward { port, host })).await
}

async fn next(end: &mut HostEnd) -> Reply {
    end.replies.next().await.unwrap()
}

async fn send(end: &mut HostEnd, data: Bytes) {
    end.inputs.send(Input::Data(data)).await.unwrap();
}

#[test]
fn bytes_go_both_ways_and_each_way_ends_by_itself() {
    with_guest(async |guest| {
        let (mut service, mut end) = connected(&guest).await;
        send(&mut end, Bytes::from_static(b"question")).await;
        end.inputs.send(Input::End(End {})).await.unwrap();
        let mut asked = String::new();
        service.read_to_string(&mut asked).await.unwrap();
        assert_eq!(asked, "question");
        // The answer comes after end of file of the question.
        service.write_all(b"answer").await.unwrap();
        drop(service);
        assert_eq!(
            next(&mut end).await,
            Reply::Data(Bytes::from_static(b"answer"))
        );
        assert!(matches!(next(&mut end).await, Reply::End(_)));
        assert!(matches!(next(&mut end).await, Reply::Done(_)));
    });
}

#[test]
fn a_service_that_ended_its_answer_still_reads() {
    with_guest(async |guest| {
        let (mut service, mut end) = connected(&guest).await;
        service.shutdown().await.unwrap();
        assert!(matches!(next(&mut end).await, Reply::End(_)));
        send(&mut end, Bytes::from_static(b"late")).await;
        end.inputs.send(Input::End(End {})).await.unwrap();
        let mut said = String::new();
        service.read_to_string(&mut said).await.unwrap();
        assert_eq!(said, "late");
        assert!(matches!(next(&mut end).await, Reply::Done(_)));
    });
}

#[test]
fn much_is_carried_whole() {
    with_guest(async |guest| {
        const BYTES: usize = 24 * 1024 * 1024;
        let (service, end) = connected(&guest).await;
        let (mut read, mut write) = service.into_split();
        let echo = tokio::spawn(async move { tokio::io::copy(&mut read, &mut write).await });
        let chunk = Bytes::from((0..=255).cycle().take(100_000).collect::<Vec<u8>>());
        let HostEnd {
            mut replies,
            mut inputs,
        } = end;
        let sending = async {
            let mut left = BYTES;
            while left > 0 {
                let chunk = chunk.slice(..left.min(chunk.len()));
                left -= chunk.len();
                inputs.send(Input::Data(chunk)).await.unwrap();
            }
            inputs.send(Input::End(End {})).await.unwrap();
            inputs
        };
        let receiving = async {
            let mut got = Vec::new();
            loop {
                match replies.next().await.unwrap() {
                    Reply::Data(data) => got.extend_from_slice(&data),
                    Reply::End(_) => {}
                    Reply::Done(_) => return got,
                    other => panic!("{other:?}"),
                }
            }
        };
        let (_inputs, got) = tokio::join!(sending, receiving);
        assert_eq!(got.len(), BYTES);
        let right = got.iter().enumerate();
        let right = right.fold(true, |right, (at, byte)| {
            right && *byte == chunk[at % 100_000]
        });
        assert!(right, "what came back is not what was sent");
        assert_eq!(echo.await.unwrap().unwrap(), BYTES as u64);
    });
}

#[test]
fn a_host_that_closes_ends_it_also_when_the_service_reads_nothing() {
    with_guest(async |guest| {
        let (mut service, mut end) = connected(&guest).await;
        let chunk = Bytes::from(vec![7; 100_000]);
        // Until the buffers are full.
        let fill = async {
            loop {
                send(&mut end, chunk.clone()).await;
            }
        };
        let full = tokio::time::timeout(Duration::from_secs(1), fill).await;
        assert!(full.is_err());
        drop(end);
        let mut sink = Vec::new();
        // Ends, or is reset: the guest has closed it.
        let _ = service.read_to_end(&mut sink).await;
    });
}

#[test]
fn only_loopback_and_only_ports_with_a_listener() {
    with_guest(async |guest| {
        let unused = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = unused.local_addr().unwrap().port().into();
        drop(unused);
        for (port, host, code) in [
            (port, "", ErrorCode::Precondition),
            (0, "", ErrorCode::Invalid),
            (70_000, "", ErrorCode::Invalid),
            (80, "192.0.2.1", ErrorCode::Invalid),
            (80, "example.com", ErrorCode::Invalid),
        ] {
            match next(&mut forward(&guest, port, host).await).await {
                Reply::Error(error) => assert_eq!(error.code(), code, "{port} {host} {error:?}"),
                other => panic!("{port} {host}: {other:?}"),
            }
        }
    });
}

#[test]
fn the_other_loopback_is_tried_too() {
    with_guest(async |guest| {
        let Ok(listener) = TcpListener::bind("[::1]:0").await else {
            // A machine without IPv6 has no services on it.
            return;
        };
        let port = listener.local_addr().unwrap().port().into();
        for host in ["", "localhost", "127.0.0.1", "::1", "0.0.0.0"] {
            let mut end = forward(&guest, port, host).await;
            assert!(
                matches!(next(&mut end).await, Reply::Connected(_)),
                "{host}"
            );
        }
    });
}
