//! Starts a command that goes on without a client, and comes back to it on another connection.
//!
//! `cargo run -p k8e-api --example background [SOCKET]`
#![expect(clippy::print_stdout, reason = "an example that shows what it got")]

use k8e_api::client::{Client, Endpoint};
use k8e_api::v1::{self, run_start::Program, watch_run_response::Event};
use std::error::Error;
use std::path::PathBuf;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let socket = std::env::args_os().nth(1);
    let socket = socket.map_or_else(|| PathBuf::from("/var/lib/k8e/k8e.sock"), PathBuf::from);
    let endpoint = Endpoint::Unix(socket);
    let run_id = start(&endpoint, &["echo", "still here"]).await?;
    let (output, status) = watch(&endpoint, &run_id).await?;
    println!("{run_id} {status}: {output}");
    Ok(())
}

/// The run is on the server when this returns: the connection may go, and the server may restart.
pub(crate) async fn start(endpoint: &Endpoint, argv: &[&str]) -> Result<String, Box<dyn Error>> {
    let mut client = Client::connect(endpoint).await?;
    let args = argv.iter().map(|arg| arg.as_bytes().to_vec().into());
    let start = v1::RunStart {
        program: Some(Program::Argv(v1::Argv {
            args: args.collect(),
        })),
        ..v1::RunStart::default()
    };
    Ok(client.start_run(start).await?.into_inner().run_id)
}

/// What it has written and writes, from the beginning to its end. `get_run` is for a look in passing.
pub(crate) async fn watch(
    endpoint: &Endpoint,
    run_id: &str,
) -> Result<(String, String), Box<dyn Error>> {
    let mut client = Client::connect(endpoint).await?;
    let watch = v1::WatchRunRequest {
        run_id: run_id.to_owned(),
    };
    let mut events = client.watch_run(watch).await?.into_inner();
    let mut output = Vec::new();
    while let Some(event) = events.message().await? {
        match event.event {
            Some(Event::Stdout(bytes) | Event::Stderr(bytes)) => output.extend_from_slice(&bytes),
            Some(Event::Ended(run)) => return Ok((String::from_utf8(output)?, run.status)),
            None => {}
        }
    }
    Err("the server ended the stream without saying how the run ended".into())
}
