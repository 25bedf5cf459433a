//! Runs Python in a fresh sandbox, with standard input, and reads its output as it comes.
//!
//! `cargo run -p k8e-api --example run [SOCKET]`
#![expect(clippy::print_stdout, reason = "an example that shows what it got")]

use k8e_api::client::{Client, Endpoint};
use k8e_api::v1::{self, run_event::Event, run_request::Message, run_start::Program};
use std::error::Error;
use std::path::PathBuf;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let socket = std::env::args_os().nth(1);
    let socket = socket.map_or_else(|| PathBuf::from("/var/lib/k8e/k8e.sock"), PathBuf::from);
    let mut client = Client::connect(&Endpoint::Unix(socket)).await?;
    let (output, exit_code) = run(&mut client, "print(input().upper())", b"hello\n").await?;
    println!("exit code {exit_code}: {output}");
    Ok(())
}

/// One run in a session of its own, which is destroyed afterwards (`fresh`). To keep files and
/// processes, create a session first and name it in `session_id`.
pub(crate) async fn run(
    client: &mut Client,
    code: &str,
    input: &'static [u8],
) -> Result<(String, i32), Box<dyn Error>> {
    let start = v1::RunStart {
        fresh: true,
        program: Some(Program::Code(v1::Code {
            language: "python".to_owned(),
            code: code.as_bytes().to_vec().into(),
        })),
        timeout_ms: 60_000,
        stdin: true,
        ..v1::RunStart::default()
    };
    // Whatever follows the start: input, the end of it, signals. Dropping the call cancels the run.
    let messages = [
        Message::Start(start),
        Message::Stdin(input.into()),
        Message::StdinEnd(true),
    ];
    let requests = messages.map(|message| v1::RunRequest {
        message: Some(message),
    });
    let mut events = client.run(tokio_stream::iter(requests)).await?.into_inner();
    let mut output = Vec::new();
    while let Some(event) = events.message().await? {
        match event.event {
            Some(Event::Stdout(bytes) | Event::Stderr(bytes)) => output.extend_from_slice(&bytes),
            Some(Event::Exited(exited)) => {
                return Ok((String::from_utf8(output)?, exited.exit_code));
            }
            Some(Event::Started(_)) | None => {}
        }
    }
    Err("the server ended the stream without saying how the run ended".into())
}
