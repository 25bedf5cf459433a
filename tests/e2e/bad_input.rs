//! Bad input: each ends in a clear error that says what to do, with nothing lost and nothing leaked.

mod code;
mod disconnect;
mod disk;
mod guest;
mod ids;
mod kinds;
mod load;
mod names;
mod paths;
mod server;
mod usage;

use k8e_api::client::{Client, Endpoint};
use k8e_api::v1;
use k8e_e2e::{Ran, Server};
use std::time::{Duration, Instant};
use tonic::{Code, Status};

/// The API without the command line, for what the command line would not send.
struct Api {
    runtime: tokio::runtime::Runtime,
    endpoint: Endpoint,
}

// === impl Api ===

impl Api {
    fn of(server: &Server) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let endpoint = Endpoint::Unix(server.socket());
        Self { runtime, endpoint }
    }

    /// Runs `work` with a connection of its own.
    fn call<T, F: Future<Output = T>>(&self, work: impl FnOnce(Client) -> F) -> T {
        self.runtime.block_on(async {
            let client = Client::connect(&self.endpoint)
                .await
                .expect("the server answers");
            work(client).await
        })
    }
}

/// The command failed as a request does, in JSON and in words, and every word is in its message.
#[track_caller]
fn refused(ran: &Ran, words: &[&str]) {
    assert_eq!(ran.code, 1, "{}", ran.all());
    let json = ran.json();
    let error = json["error"].as_str().expect("an error in JSON");
    assert!(json["detail"].is_string(), "{}", ran.all());
    for word in words {
        assert!(error.contains(word), "no {word:?} in: {}", ran.all());
        assert!(ran.err().contains(word), "no {word:?} in: {}", ran.all());
    }
}

/// The call failed with this code, and every word is in its message.
#[track_caller]
fn told<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, words: &[&str]) {
    let status = result.expect_err("the call is refused");
    assert_eq!(status.code(), code, "{status:?}");
    for word in words {
        assert!(
            status.message().contains(word),
            "no {word:?} in: {status:?}"
        );
    }
}

/// A first message that runs a program.
fn argv(session: &str, args: &[&str]) -> v1::RunRequest {
    let args = args.iter().map(|arg| arg.to_string().into()).collect();
    let start = v1::RunStart {
        session_id: session.to_owned(),
        program: Some(v1::run_start::Program::Argv(v1::Argv { args })),
        ..Default::default()
    };
    v1::RunRequest {
        message: Some(v1::run_request::Message::Start(start)),
    }
}

/// Waits until a condition holds.
#[track_caller]
fn eventually(what: &str, within: Duration, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + within;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not after {within:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Processes of a session, without its agent.
fn processes(server: &Server, id: &str) -> Vec<String> {
    let ps = server.k8e(&["sandbox", "ps", id]).json();
    let all = ps["processes"].as_array().cloned().unwrap_or_default();
    assert!(!all.is_empty(), "a sandbox has its agent: {ps}");
    all.iter()
        .filter(|process| process["pid"] != 1)
        .map(ToString::to_string)
        .collect()
}
