//! A thousand sessions asked for at once: as many as fit are made, in their turn, and everybody else
//! is told at once when to try again. Meanwhile the server answers.

use k8e_api::client::{Client, Endpoint};
use k8e_api::status::retry_after;
use k8e_api::v1;
use k8e_e2e::Server;
use std::collections::HashSet;
use std::time::{Duration, Instant};
use tonic::Code;

const ASKED: usize = 1000;

/// What a person waits for the answer to a question, on a machine that makes sandboxes meanwhile.
const RESPONSIVE: Duration = Duration::from_secs(5);

#[test]
fn native() {
    flood("native", 200);
}

#[test]
fn gvisor() {
    flood("gvisor", 12);
}

fn flood(runtime: &str, fit: usize) {
    let max = fit.to_string();
    let flags = ["--default-runtime", runtime, "--max-sessions", &max];
    let mut server =
        Server::start_with(&[&flags[..], &["--pool-min", "2", "--pool-max", "4"]].concat());
    let endpoint = Endpoint::Unix(server.socket());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (made, refused) = runtime.block_on(async {
        let client = Client::connect(&endpoint).await.unwrap();
        let mut asked = tokio::task::JoinSet::new();
        for _ in 0..ASKED {
            let mut client = client.clone();
            asked.spawn(async move { client.create_session(request()).await });
        }
        let mut watched = client.clone();
        let mut slowest = Duration::ZERO;
        let (mut made, mut refused) = (HashSet::new(), 0);
        loop {
            let since = Instant::now();
            watched.get_status(v1::GetStatusRequest {}).await.unwrap();
            slowest = slowest.max(since.elapsed());
            let answer = match asked.join_next().await {
                None => break,
                Some(answer) => answer.unwrap(),
            };
            match answer {
                Ok(answer) => assert!(made.insert(answer.into_inner().session_id)),
                Err(status) => {
                    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
                    assert!(status.message().contains("--max-sessions"), "{status}");
                    assert!(retry_after(&status).is_some(), "{status:?}");
                    refused += 1;
                }
            }
        }
        assert!(slowest < RESPONSIVE, "{slowest:?}");
        (made, refused)
    });
    assert_eq!((made.len(), refused), (fit, ASKED - fit));
    let listed: HashSet<String> = server.session_ids().into_iter().collect();
    assert_eq!(listed, made);
    // Each of them works.
    for id in made.iter().take(10) {
        let ran = server.k8e(&["sandbox", "run", "--raw", "--session-id", id, "echo here"]);
        assert_eq!(ran.out(), "here\n", "{}", ran.all());
    }
    runtime.block_on(async {
        let client = Client::connect(&endpoint).await.unwrap();
        let mut ended = tokio::task::JoinSet::new();
        for session_id in made {
            let mut client = client.clone();
            let request = v1::DestroySessionRequest { session_id };
            ended.spawn(async move { client.destroy_session(request).await });
        }
        while let Some(answer) = ended.join_next().await {
            answer.unwrap().unwrap();
        }
    });
    server.stop();
    server.assert_traces(0);
}

fn request() -> v1::CreateSessionRequest {
    v1::CreateSessionRequest {
        tenant: "flood".to_owned(),
        ..v1::CreateSessionRequest::default()
    }
}
