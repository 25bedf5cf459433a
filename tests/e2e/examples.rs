//! The examples of the Rust client (`crates/api/examples`), each run against a real server.

use k8e_api::client::{Client, Endpoint};
use k8e_e2e::Server;

#[expect(dead_code, reason = "what runs here is called by its main, too")]
#[path = "../../crates/api/examples/background.rs"]
mod background;
#[expect(dead_code, reason = "what runs here is called by its main, too")]
#[path = "../../crates/api/examples/connect.rs"]
mod connect;
#[expect(dead_code, reason = "what runs here is called by its main, too")]
#[path = "../../crates/api/examples/files.rs"]
mod files;
#[expect(dead_code, reason = "what runs here is called by its main, too")]
#[path = "../../crates/api/examples/run.rs"]
mod run;

#[tokio::test]
async fn every_example_of_the_client_does_what_it_shows() {
    let server = Server::start();
    let endpoint = Endpoint::Unix(server.socket());

    let status = connect::connect(server.socket()).await.unwrap();
    assert!(status.starts_with("k8e 0."), "{status}");
    assert!(status.contains("(default native)"), "{status}");

    let mut client = Client::connect(&endpoint).await.unwrap();
    let (output, exit_code) = run::run(&mut client, "print(input().upper()); exit(3)", b"hello\n")
        .await
        .unwrap();
    assert_eq!((output.as_str(), exit_code), ("HELLO\n", 3));

    // More than one message.
    let content = vec![7; 3 * k8e_api::CHUNK_BYTES + 1];
    let (names, came_back) = files::files(&mut client, &content).await.unwrap();
    assert!(
        names.iter().any(|name| name.ends_with("data/input.bin")),
        "{names:?}"
    );
    assert!(came_back == content, "{} bytes came back", came_back.len());

    let run_id = background::start(&endpoint, &["echo", "still here"])
        .await
        .unwrap();
    let (output, status) = background::watch(&endpoint, &run_id).await.unwrap();
    assert_eq!(
        (output.as_str(), status.as_str()),
        ("still here\n", "completed")
    );
}
