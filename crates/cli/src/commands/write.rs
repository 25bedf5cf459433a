//! `k8e sandbox write`: writes standard input to a file, atomically.

use super::files::{ChangedJson, path_bytes};
use crate::failure::Failure;
use crate::output;
use crate::units;
use clap::{Args, ValueEnum};
use k8e_api::CHUNK_BYTES;
use k8e_api::client::Client;
use k8e_api::v1::{self, write_file_request::Message};
use std::ffi::OsString;
use tokio::io::AsyncReadExt as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Queue of messages: enough to keep the connection busy.
const QUEUE_MAX: usize = 4;

/// First paragraphs of `k8e sandbox write --help`.
pub(super) const LONG_ABOUT: &str = "\
Write standard input to a file below /workspace, of any size. Missing directories are created. The file
is replaced atomically, once all of its content has arrived.";

/// Arguments of `k8e sandbox write`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox write $SID main.py < main.py
  echo 'one more line' | k8e sandbox write $SID notes.txt --mode a
  k8e sandbox write $SID run.sh --perm 0755 < run.sh")]
pub struct WriteArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,

    /// Path of the file, absolute or relative to /workspace; nothing outside /workspace
    path: OsString,

    /// w to replace the file, a to append to it
    #[arg(long, value_enum, default_value = "w")]
    mode: WriteMode,

    /// Permissions of the file, octal [default: 0644; unchanged for an existing file]
    #[arg(long, value_name = "MODE", value_parser = units::permissions)]
    perm: Option<u32>,
}

/// Values of --mode, as in the Go K8E.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WriteMode {
    /// Replace
    W,
    /// Append
    A,
}

pub(crate) async fn run(args: WriteArgs, mut client: Client) -> Result<u8, Failure> {
    let path = args.path.clone();
    let (sender, receiver) = mpsc::channel(QUEUE_MAX);
    let start = v1::WriteFileStart {
        session_id: args.session_id,
        path: path_bytes(args.path),
        append: args.mode == WriteMode::A,
        mode: args.perm.unwrap_or(0),
    };
    let first = v1::WriteFileRequest {
        message: Some(Message::Start(start)),
    };
    sender.try_send(first).expect("a new channel has room");

    let call = client.write_file(ReceiverStream::new(receiver));
    let written = tokio::select! {
        answer = call => answer?.into_inner().bytes,
        // Reading failed: the call is cancelled, and the old file is kept.
        failure = feed(sender) => return Err(failure),
    };
    output::json(&ChangedJson::new(&path, Some(written))).map(|()| 0)
}

/// Sends standard input; ends the stream, and so commits the file, only after all of it was read.
async fn feed(sender: mpsc::Sender<v1::WriteFileRequest>) -> Failure {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match stdin.read(&mut buffer).await {
            Ok(0) => break,
            Ok(length) => {
                let data = Message::Data(buffer[..length].to_vec().into());
                let sent = sender
                    .send(v1::WriteFileRequest {
                        message: Some(data),
                    })
                    .await;
                if sent.is_err() {
                    // The server responded early: its response says why.
                    break;
                }
            }
            Err(e) => return Failure::io("read standard input", &e),
        }
    }
    drop(sender);
    std::future::pending().await
}
