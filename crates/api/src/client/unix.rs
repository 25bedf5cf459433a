//! Connects to a Unix socket: at a path of any length, and with retries while the listener's backlog is full.

use hyper_util::rt::TokioIo;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;
use tonic::transport::Uri;
use tower::service_fn;

/// Retries while the backlog is full. That of a busy server empties in milliseconds; ten seconds of it is a hung one.
const BUSY_TRIES_MAX: u32 = 1000;
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// The connector that tonic calls.
pub(super) fn connector(
    path: PathBuf,
) -> impl tower::Service<Uri, Response = TokioIo<UnixStream>, Error = io::Error, Future: Send>
+ Send
+ 'static {
    service_fn(move |_: Uri| {
        let path = path.clone();
        async move { connect(&path).await.map(TokioIo::new) }
    })
}

/// Linux answers `EAGAIN` when the backlog of a Unix listener is full, where TCP would wait.
async fn connect(path: &Path) -> io::Result<UnixStream> {
    for _ in 0..BUSY_TRIES_MAX {
        match connect_once(path).await {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(BUSY_PAUSE).await,
            other => return other,
        }
    }
    connect_once(path).await
}

#[cfg(not(target_os = "linux"))]
async fn connect_once(path: &Path) -> io::Result<UnixStream> {
    UnixStream::connect(path).await
}

#[cfg(target_os = "linux")]
async fn connect_once(path: &Path) -> io::Result<UnixStream> {
    let path = k8e_net::proc_fd::SocketPath::new(path)?;
    // Lent: tokio drops what it is given before it connects, and the descriptor must stay open until then.
    UnixStream::connect(&path).await
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_deep_socket_is_reached() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(120));
        std::fs::create_dir(&deep).unwrap();
        // Bound by its short name, moved to where no address reaches.
        let listener = tokio::net::UnixListener::bind(dir.path().join("s")).unwrap();
        let deep = deep.join("s");
        std::fs::rename(dir.path().join("s"), &deep).unwrap();
        let (client, server) = tokio::join!(connect(&deep), listener.accept());
        client.unwrap();
        server.unwrap();
    }

    #[tokio::test]
    async fn a_missing_socket_is_not_found() {
        let dir = tempfile::tempdir().unwrap();
        let error = connect(&dir.path().join("s")).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
