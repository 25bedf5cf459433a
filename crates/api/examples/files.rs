//! Creates a session, writes a file into it, lists the workspace and reads the file back.
//!
//! `cargo run -p k8e-api --example files [SOCKET]`
#![expect(clippy::print_stdout, reason = "an example that shows what it got")]

use k8e_api::CHUNK_BYTES;
use k8e_api::client::{Client, Endpoint};
use k8e_api::v1::{self, read_file_response, write_file_request::Message};
use std::error::Error;
use std::path::PathBuf;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let socket = std::env::args_os().nth(1);
    let socket = socket.map_or_else(|| PathBuf::from("/var/lib/k8e/k8e.sock"), PathBuf::from);
    let mut client = Client::connect(&Endpoint::Unix(socket)).await?;
    let (names, content) = files(&mut client, b"some bytes\n").await?;
    println!("{names:?}: {} bytes came back", content.len());
    Ok(())
}

/// A session lives until it is destroyed, or its lifetime or idle timeout is over.
pub(crate) async fn files(
    client: &mut Client,
    content: &[u8],
) -> Result<(Vec<String>, Vec<u8>), Box<dyn Error>> {
    let create = v1::CreateSessionRequest {
        idle_timeout_s: 600,
        ..v1::CreateSessionRequest::default()
    };
    let session = client.create_session(create).await?.into_inner();
    let outcome = in_session(client, &session.session_id, content).await;
    let destroy = v1::DestroySessionRequest {
        session_id: session.session_id,
    };
    client.destroy_session(destroy).await?;
    outcome
}

async fn in_session(
    client: &mut Client,
    session: &str,
    content: &[u8],
) -> Result<(Vec<String>, Vec<u8>), Box<dyn Error>> {
    let start = v1::WriteFileStart {
        session_id: session.to_owned(),
        path: "data/input.bin".into(),
        ..v1::WriteFileStart::default()
    };
    // The file is there once the stream has ended and the call is answered, and then it is whole.
    let chunks = content.chunks(CHUNK_BYTES);
    let chunks = chunks.map(|chunk| Message::Data(chunk.to_vec().into()));
    let messages: Vec<_> = std::iter::once(Message::Start(start))
        .chain(chunks)
        .map(|message| v1::WriteFileRequest {
            message: Some(message),
        })
        .collect();
    client.write_file(tokio_stream::iter(messages)).await?;

    let list = v1::ListFilesRequest {
        session_id: session.to_owned(),
        path: ".".into(),
        recursive: true,
        ..v1::ListFilesRequest::default()
    };
    let mut pages = client.list_files(list).await?.into_inner();
    let mut names = Vec::new();
    while let Some(page) = pages.message().await? {
        let paths = page.files.iter().map(|file| &file.path);
        names.extend(paths.map(|path| String::from_utf8_lossy(path).into_owned()));
    }

    let read = v1::ReadFileRequest {
        session_id: session.to_owned(),
        path: "data/input.bin".into(),
        ..v1::ReadFileRequest::default()
    };
    let mut pieces = client.read_file(read).await?.into_inner();
    let mut came_back = Vec::new();
    while let Some(piece) = pieces.message().await? {
        if let Some(read_file_response::Message::Data(bytes)) = piece.message {
            came_back.extend_from_slice(&bytes);
        }
    }
    Ok((names, came_back))
}
