//! A scripted guest for tests: it sends any replies, also malformed and hostile ones.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "a script knows the calls it wants"
)]

use crate::thread::GuestThread;
use k8e_wire::proto::{HelloReply, Reply, input, reply, request};
use k8e_wire::{FrameWriter, GuestEnd, PROTOCOL};
use std::future::Future as _;
use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{UnixListener, UnixStream};

/// The steps for a connection, given its request. None is the normal reply to `Hello`.
pub type Script = Arc<dyn Fn(&request::Call) -> Option<Vec<Step>> + Send + Sync>;

/// One step on a connection. After the last it is closed.
#[derive(Clone, Debug)]
pub enum Step {
    /// Sends a reply.
    Reply(reply::Reply),
    /// Sends bytes without framing.
    Raw(Vec<u8>),
    /// Waits for this long.
    Pause(Duration),
    /// Reads the host's input up to its end.
    TakeInput,
    /// Waits until the host closes.
    Stall,
    /// Sends this reply repeatedly until the host closes.
    Flood(reply::Reply),
}

/// A running scripted guest. Dropping it closes its connections.
pub struct ScriptedGuest {
    _thread: GuestThread,
}

// === impl ScriptedGuest ===

impl ScriptedGuest {
    /// Starts the guest, listening at `path`.
    pub fn start(path: &Path, script: Script) -> std::io::Result<Self> {
        Ok(Self {
            _thread: GuestThread::start(path, |listener| serve(listener, script))?,
        })
    }
}

/// The normal reply to `Hello`.
pub fn hello() -> reply::Reply {
    reply::Reply::Hello(HelloReply {
        processes: 0,
        protocol: PROTOCOL,
        version: "scripted".to_owned(),
    })
}

/// A reply encoded with its length prefix.
pub fn frame(reply: reply::Reply) -> Vec<u8> {
    let mut bytes = Vec::new();
    let message = Reply { reply: Some(reply) };
    {
        let mut writer = FrameWriter::new(&mut bytes);
        let mut send = std::pin::pin!(writer.send(&message));
        let sent = send.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(
            matches!(sent, Poll::Ready(Ok(()))),
            "memory takes every frame at once"
        );
    }
    bytes
}

pub(crate) async fn serve(listener: UnixListener, script: Script) {
    loop {
        let (stream, _) = listener
            .accept()
            .await
            .expect("the listener of a test works");
        tokio::spawn(answer(stream, Arc::clone(&script)));
    }
}

async fn answer(stream: UnixStream, script: Script) {
    // Two handles of one socket: one with the protocol, one for raw bytes.
    let stream = stream
        .into_std()
        .expect("a connection can leave the runtime");
    let raw = stream
        .try_clone()
        .and_then(UnixStream::from_std)
        .expect("a socket can be cloned");
    let mut raw = raw;
    let mut end =
        GuestEnd::new(UnixStream::from_std(stream).expect("a connection can join the runtime"));
    let Ok(Some(call)) = end.requests.request().await else {
        return;
    };
    let steps = script(&call).unwrap_or_else(|| match call {
        request::Call::Hello(_) => vec![Step::Reply(hello())],
        _ => Vec::new(),
    });
    for step in steps {
        let sent = match step {
            Step::Reply(reply) => end.replies.send(reply).await.is_ok(),
            Step::Raw(bytes) => raw.write_all(&bytes).await.is_ok(),
            Step::Pause(time) => {
                tokio::time::sleep(time).await;
                true
            }
            Step::TakeInput => loop {
                match end.requests.input().await {
                    Ok(Some(input::Input::End(_))) => break true,
                    Ok(Some(_)) => {}
                    _ => break false,
                }
            },
            Step::Stall => {
                while let Ok(Some(_)) = end.requests.input().await {}
                false
            }
            Step::Flood(reply) => {
                while end.replies.send(reply.clone()).await.is_ok() {}
                false
            }
        };
        if !sent {
            return;
        }
    }
}
