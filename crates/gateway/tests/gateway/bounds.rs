//! Bounds of one client: timeouts of its streams, and calls per connection.

use crate::server::{SOON, TestServer};
use k8e_api::client::Client;
use k8e_api::v1::{self, write_file_request::Message};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

type Messages = mpsc::Sender<v1::WriteFileRequest>;

fn message(message: Message) -> v1::WriteFileRequest {
    v1::WriteFileRequest {
        message: Some(message),
    }
}

/// A write under way, with these messages sent so far; more can be.
fn write(
    client: &Client,
    messages: Vec<Message>,
) -> (
    Messages,
    tokio::task::JoinHandle<Result<tonic::Response<v1::WriteFileResponse>, Status>>,
) {
    let (sender, receiver) = mpsc::channel(8);
    for sent in messages {
        sender.try_send(message(sent)).unwrap();
    }
    let mut client = client.clone();
    let call = tokio::spawn(async move { client.write_file(ReceiverStream::new(receiver)).await });
    (sender, call)
}

async fn session(client: &Client) -> String {
    let create = v1::CreateSessionRequest::default();
    let made = client.clone().create_session(create).await.unwrap();
    made.into_inner().session_id
}

fn start(session_id: &str) -> Message {
    Message::Start(v1::WriteFileStart {
        session_id: session_id.to_owned(),
        path: b"f".to_vec().into(),
        ..Default::default()
    })
}

/// How a call ends when nothing happens any more. Until then the clock stands still but for jumps.
async fn in_the_end<T>(call: tokio::task::JoinHandle<T>) -> T {
    // Real time for what is on its way.
    tokio::time::sleep(Duration::from_millis(300)).await;
    tokio::time::pause();
    let result = tokio::time::timeout(Duration::from_secs(600), call).await;
    tokio::time::resume();
    result.expect("it is given up").unwrap()
}

#[tokio::test]
async fn a_write_that_does_not_say_where_is_given_up() {
    let server = TestServer::start().await;
    let client = server.local().await;
    let (_sender, call) = write(&client, vec![]);
    let status = in_the_end(call).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert!(status.message().contains("first message of a write"));
}

#[tokio::test]
async fn a_write_that_stalls_is_given_up() {
    let server = TestServer::stalling().await;
    let client = server.local().await;
    let id = session(&client).await;
    let (_sender, call) = write(&client, vec![start(&id), Message::Data("x".into())]);
    let status = in_the_end(call).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert!(status.message().contains("nothing came for 60s"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_ends_with_its_session() {
    let server = TestServer::stalling().await;
    let client = server.local().await;
    let session_id = session(&client).await;
    let (_sender, call) = write(&client, vec![start(&session_id), Message::Data("x".into())]);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let destroy = v1::DestroySessionRequest { session_id };
    client.clone().destroy_session(destroy).await.unwrap();
    let status = tokio::time::timeout(SOON, call).await;
    let status = status.expect("the write ends").unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(
        status.message().contains("not found: it ended meanwhile"),
        "{status}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn one_connection_has_so_many_calls_under_way() {
    let server = TestServer::start().await;
    let full = server.local().await;
    let mut calls: Vec<_> = (0..128).map(|_| write(&full, vec![])).collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mut waiting = full.clone();
    let waiting = tokio::spawn(async move { waiting.get_status(v1::GetStatusRequest {}).await });
    // Others do not notice.
    let mut other = server.local().await;
    let status = other.get_status(v1::GetStatusRequest {});
    tokio::time::timeout(SOON, status).await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished());
    // One that ends makes room.
    drop(calls.pop());
    let status = tokio::time::timeout(SOON, waiting).await.unwrap();
    status.unwrap().unwrap();
}
