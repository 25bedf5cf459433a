//! Length-prefixed messages over any byte stream.

use bytes::{Buf, BufMut, BytesMut};
use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const PREFIX_BYTES: usize = 4;

/// Why a connection to the other end is of no more use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The stream failed.
    #[error("the connection failed")]
    Io(#[source] std::io::Error),
    /// The stream ended inside a frame, or where one was due.
    #[error("the connection ended in the middle of a call")]
    Eof,
    /// A frame says it is larger than this end takes.
    #[error("a frame of {bytes} bytes, at most {max} are taken")]
    TooLarge {
        /// What the frame says.
        bytes: usize,
        /// What this end takes.
        max: usize,
    },
    /// A frame is not a message.
    #[error("a frame that is not a message")]
    Decode(#[source] prost::DecodeError),
    /// A message that does not belong at this point of the call.
    #[error("a message out of turn: {0}")]
    OutOfTurn(&'static str),
}

/// Reads messages. Cancel safe: a dropped `next` loses nothing.
#[derive(Debug)]
pub struct FrameReader<R> {
    io: R,
    buffer: BytesMut,
    frame_bytes_max: usize,
}

/// Writes messages. Not cancel safe: a dropped `send` may leave half a frame.
#[derive(Debug)]
pub struct FrameWriter<W> {
    io: W,
    buffer: BytesMut,
}

// === impl FrameReader ===

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Reads from `io` and refuses frames over `frame_bytes_max`.
    pub fn new(io: R, frame_bytes_max: usize) -> Self {
        Self {
            io,
            buffer: BytesMut::new(),
            frame_bytes_max,
        }
    }

    /// What it reads from.
    pub fn get_ref(&self) -> &R {
        &self.io
    }

    /// The next message, or none when the other end closed between two.
    pub async fn next<M: Message + Default>(&mut self) -> Result<Option<M>, WireError> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(Some(message));
            }
            if self
                .io
                .read_buf(&mut self.buffer)
                .await
                .map_err(WireError::Io)?
                == 0
            {
                return if self.buffer.is_empty() {
                    Ok(None)
                } else {
                    Err(WireError::Eof)
                };
            }
        }
    }

    fn take<M: Message + Default>(&mut self) -> Result<Option<M>, WireError> {
        let Some(prefix) = self.buffer.first_chunk::<PREFIX_BYTES>() else {
            self.buffer.reserve(PREFIX_BYTES + 1024);
            return Ok(None);
        };
        let bytes = u32::from_be_bytes(*prefix) as usize;
        if bytes > self.frame_bytes_max {
            return Err(WireError::TooLarge {
                bytes,
                max: self.frame_bytes_max,
            });
        }
        if self.buffer.len() < PREFIX_BYTES + bytes {
            // Grow with what arrives, at most a chunk ahead: a peer that only announces much costs nothing.
            let missing = PREFIX_BYTES + bytes - self.buffer.len();
            self.buffer.reserve(missing.min(crate::CHUNK_BYTES));
            return Ok(None);
        }
        self.buffer.advance(PREFIX_BYTES);
        let frame = self.buffer.split_to(bytes).freeze();
        M::decode(frame).map(Some).map_err(WireError::Decode)
    }
}

// === impl FrameWriter ===

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    /// Writes to `io`.
    pub fn new(io: W) -> Self {
        Self::with_held(io, BytesMut::new())
    }

    /// Writes to `io`, first what is held already.
    pub(crate) fn with_held(io: W, buffer: BytesMut) -> Self {
        Self { io, buffer }
    }

    /// Writes one message, and what was [held](Self::hold) before it.
    pub async fn send<M: Message>(&mut self, message: &M) -> Result<(), WireError> {
        self.hold(message)?;
        self.flush().await
    }

    /// Keeps a message until the next is sent, or [`Self::flush`] is called.
    pub fn hold<M: Message>(&mut self, message: &M) -> Result<(), WireError> {
        put(&mut self.buffer, message)
    }

    /// Writes what is held.
    pub async fn flush(&mut self) -> Result<(), WireError> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let written = self.io.write_all(&self.buffer).await;
        self.buffer.clear();
        written.map_err(WireError::Io)?;
        self.io.flush().await.map_err(WireError::Io)
    }
}

/// Adds a message with its length to `buffer`.
pub(crate) fn put<M: Message>(buffer: &mut BytesMut, message: &M) -> Result<(), WireError> {
    let bytes = message.encoded_len();
    let prefix = u32::try_from(bytes).map_err(|_| WireError::TooLarge {
        bytes,
        max: u32::MAX as usize,
    })?;
    buffer.reserve(PREFIX_BYTES + bytes);
    buffer.put_u32(prefix);
    message
        .encode(buffer)
        .expect("the buffer was reserved for it");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Reply, reply};
    use proptest::prelude::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
    }

    fn stdout(data: &[u8]) -> Reply {
        Reply {
            reply: Some(reply::Reply::Stdout(data.to_vec().into())),
        }
    }

    proptest! {
        #[test]
        fn what_is_sent_arrives(data in proptest::collection::vec(any::<u8>(), 0..2000), split in 1usize..64) {
            runtime().block_on(async {
                let (a, b) = tokio::io::duplex(split);
                let (mut writer, mut reader) = (FrameWriter::new(a), FrameReader::new(b, 4096));
                let message = stdout(&data);
                let send = async { writer.send(&message).await.unwrap(); drop(writer) };
                let receive = async {
                    let got: Option<Reply> = reader.next().await.unwrap();
                    let end: Option<Reply> = reader.next().await.unwrap();
                    (got, end)
                };
                let ((), (got, end)) = tokio::join!(send, receive);
                assert_eq!(got.unwrap(), message);
                assert!(end.is_none());
            });
        }

        #[test]
        fn garbage_is_an_error_or_a_message_never_a_panic(data in proptest::collection::vec(any::<u8>(), 0..512)) {
            runtime().block_on(async {
                let mut reader = FrameReader::new(data.as_slice(), 256);
                while let Ok(Some(_)) = reader.next::<Reply>().await {}
            });
        }
    }

    #[test]
    fn an_announced_giant_is_refused_before_it_is_held() {
        runtime().block_on(async {
            let mut reader = FrameReader::new(&[0xff, 0xff, 0xff, 0xff][..], 1024);
            assert!(matches!(
                reader.next::<Reply>().await,
                Err(WireError::TooLarge { .. })
            ));
        });
    }

    #[test]
    fn an_end_inside_a_frame_is_told() {
        runtime().block_on(async {
            let mut reader = FrameReader::new(&[0, 0, 0, 9, 1][..], 1024);
            assert!(matches!(reader.next::<Reply>().await, Err(WireError::Eof)));
        });
    }
}
