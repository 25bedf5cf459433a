//! Length-prefixed framing of protobuf messages over a byte stream.

use bytes::{Buf, BufMut, BytesMut};
use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const PREFIX_BYTES: usize = 4;

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The stream failed.
    #[error("the connection failed")]
    Io(#[source] std::io::Error),
    /// EOF inside a frame, or where a frame was expected.
    #[error("the connection ended in the middle of a call")]
    Eof,
    /// The length prefix of a frame exceeds the limit of this end.
    #[error("a frame of {bytes} bytes, at most {max} are taken")]
    TooLarge {
        /// Length prefix of the frame.
        bytes: usize,
        /// Limit of this end.
        max: usize,
    },
    /// A frame cannot be decoded.
    #[error("a frame that is not a message")]
    Decode(#[source] prost::DecodeError),
    /// A valid message that is not expected at this point of the call.
    #[error("a message out of turn: {0}")]
    OutOfTurn(&'static str),
}

/// Decodes messages from a stream. Cancel safe: dropping `next` loses no bytes.
#[derive(Debug)]
pub struct FrameReader<R> {
    io: R,
    buffer: BytesMut,
    frame_bytes_max: usize,
}

/// Encodes messages to a stream. Not cancel safe: dropping `send` may leave a partial frame.
#[derive(Debug)]
pub struct FrameWriter<W> {
    io: W,
    buffer: BytesMut,
}

// === impl FrameReader ===

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Reads from `io` and rejects frames over `frame_bytes_max`.
    pub fn new(io: R, frame_bytes_max: usize) -> Self {
        Self {
            io,
            buffer: BytesMut::new(),
            frame_bytes_max,
        }
    }

    /// The underlying reader.
    pub fn get_ref(&self) -> &R {
        &self.io
    }

    /// The next message; none at EOF between two messages.
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

    /// The next message, if all of it was read already.
    pub(crate) fn take<M: Message + Default>(&mut self) -> Result<Option<M>, WireError> {
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
            // Grow with the bytes that arrive, at most a chunk ahead: a large prefix alone costs no memory.
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
    /// Writes to `io`, with an empty buffer.
    pub fn new(io: W) -> Self {
        Self::with_held(io, BytesMut::new())
    }

    /// Writes to `io`, starting with the encoded bytes in `buffer`.
    pub(crate) fn with_held(io: W, buffer: BytesMut) -> Self {
        Self { io, buffer }
    }

    /// Writes one message, after those that are [buffered](Self::hold).
    pub async fn send<M: Message>(&mut self, message: &M) -> Result<(), WireError> {
        self.hold(message)?;
        self.flush().await
    }

    /// Buffers a message until the next [`Self::send`] or [`Self::flush`].
    pub fn hold<M: Message>(&mut self, message: &M) -> Result<(), WireError> {
        put(&mut self.buffer, message)
    }

    /// Writes the buffered messages.
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

/// Appends a message with its length prefix to `buffer`.
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
        fn messages_round_trip(data in proptest::collection::vec(any::<u8>(), 0..2000), split in 1usize..64) {
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
        fn arbitrary_bytes_never_panic(data in proptest::collection::vec(any::<u8>(), 0..512)) {
            runtime().block_on(async {
                let mut reader = FrameReader::new(data.as_slice(), 256);
                while let Ok(Some(_)) = reader.next::<Reply>().await {}
            });
        }
    }

    #[test]
    fn an_oversized_frame_is_rejected_by_its_prefix() {
        runtime().block_on(async {
            let mut reader = FrameReader::new(&[0xff, 0xff, 0xff, 0xff][..], 1024);
            assert!(matches!(
                reader.next::<Reply>().await,
                Err(WireError::TooLarge { .. })
            ));
        });
    }

    #[test]
    fn eof_inside_a_frame_is_an_error() {
        runtime().block_on(async {
            let mut reader = FrameReader::new(&[0, 0, 0, 9, 1][..], 1024);
            assert!(matches!(reader.next::<Reply>().await, Err(WireError::Eof)));
        });
    }
}
