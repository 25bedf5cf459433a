//! Ten thousand commands at once.

use super::{Api, argv, processes};
use k8e_api::client::Client;
use k8e_api::v1::run_event::Event;
use k8e_e2e::Server;
use std::time::Duration;
use tonic::{Code, Status};

const EXECS: usize = 10_000;
const CONNECTIONS: usize = 64;

/// What one of them may take, with all others before it.
const WITHIN: Duration = Duration::from_secs(60);

#[test]
fn ten_thousand_execs_at_once() {
    let server = Server::start();
    let session = server.session();
    let api = Api::of(&server);
    let results = api.runtime.block_on(async {
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            clients.push(Client::connect(&api.endpoint).await.expect("a connection"));
        }
        let mut tasks = tokio::task::JoinSet::new();
        for i in 0..EXECS {
            let (client, id) = (clients[i % CONNECTIONS].clone(), session.id.clone());
            tasks.spawn(async move {
                let ran = tokio::time::timeout(WITHIN, echo(client, &id, i)).await;
                (i, ran.expect("none hangs"))
            });
        }
        tasks.join_all().await
    });
    assert_eq!(results.len(), EXECS, "none is lost");
    let mut completed = 0;
    for (i, result) in results {
        match result {
            Ok(out) => {
                assert_eq!(out, format!("{i}\n"), "each gets its own output");
                completed += 1;
            }
            Err(status) => {
                assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
                let named = ["under way", "limit"];
                assert!(
                    named.iter().any(|word| status.message().contains(word)),
                    "{status:?}"
                );
            }
        }
    }
    assert!(completed >= 100, "only {completed} of {EXECS} ran");
    assert_eq!(session.sh("echo fine").out(), "fine\n");
    assert_eq!(
        processes(&server, &session.id),
        [""; 0],
        "no process is left"
    );
    assert_eq!(server.session().sh("echo fine too").out(), "fine too\n");
    session.destroy();
    server.assert_traces(1);
}

/// The output of one `echo`.
async fn echo(mut client: Client, session: &str, i: usize) -> Result<String, Status> {
    let request = tokio_stream::iter([argv(session, &["echo", &i.to_string()])]);
    let mut events = client.run(request).await?.into_inner();
    let (mut out, mut exited) = (Vec::new(), false);
    while let Some(event) = events.message().await? {
        match event.event {
            Some(Event::Stdout(data)) => out.extend_from_slice(&data),
            Some(Event::Exited(exit)) => {
                assert_eq!((exit.exit_code, exit.status.as_str()), (0, "completed"));
                exited = true;
            }
            Some(Event::Started(_) | Event::Stderr(_)) | None => {}
        }
    }
    assert!(exited, "a run says how it ended");
    Ok(String::from_utf8_lossy(&out).into_owned())
}
