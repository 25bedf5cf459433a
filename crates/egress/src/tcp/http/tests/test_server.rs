//! A test server that records every byte it reads, and responds by the path.

use crate::tcp::testing::{SOON, server};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

pub(super) struct TestServer {
    pub(super) address: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    heard: Vec<String>,
    connections: usize,
}

// === impl TestServer ===

impl TestServer {
    pub(super) async fn start() -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        let address = server(move |stream| {
            shared.lock().unwrap().connections += 1;
            serve(stream, Arc::clone(&shared))
        });
        Self {
            address: address.await,
            state,
        }
    }

    /// Each request as it arrived, with its body.
    pub(super) fn heard(&self) -> Vec<String> {
        self.state.lock().unwrap().heard.clone()
    }

    pub(super) fn connections(&self) -> usize {
        self.state.lock().unwrap().connections
    }
}

/// Sends a request, and reads one response with or without `Content-Length`.
pub(super) async fn ask(stream: &mut TcpStream, request: &str) -> String {
    stream.write_all(request.as_bytes()).await.unwrap();
    let head = read_head(stream).await;
    let body = read_body(stream, &head).await.unwrap();
    head + &body.1
}

pub(super) async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = timeout(SOON, stream.read_u8()).await.expect("a head ends");
        head.push(byte.expect("a head"));
    }
    String::from_utf8(head).unwrap()
}

fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = head.split("\r\n").filter_map(|line| line.split_once(": "));
    lines
        .find(|(field, _)| field.eq_ignore_ascii_case(name))
        .map(|(_, value)| value)
}

/// The body as it was sent, and decoded.
async fn read_body(stream: &mut TcpStream, head: &str) -> io::Result<(String, String)> {
    if field(head, "transfer-encoding").is_some() {
        let mut raw = Vec::new();
        let mut body = Vec::new();
        loop {
            let line = read_line(stream, &mut raw).await?;
            let size = usize::from_str_radix(&line, 16).unwrap();
            if size == 0 {
                while !read_line(stream, &mut raw).await?.is_empty() {}
                return Ok((text(raw), text(body)));
            }
            let mut chunk = vec![0; size + 2];
            stream.read_exact(&mut chunk).await?;
            raw.extend(&chunk);
            body.extend(&chunk[..size]);
        }
    }
    let length = field(head, "content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    let body = text(body);
    Ok((body.clone(), body))
}

async fn read_line(stream: &mut TcpStream, raw: &mut Vec<u8>) -> io::Result<String> {
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") {
        line.push(stream.read_u8().await?);
    }
    raw.extend(&line);
    line.truncate(line.len() - 2);
    Ok(text(line))
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

async fn serve(mut stream: TcpStream, state: Arc<Mutex<State>>) -> io::Result<()> {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let head = text(head);
        let path = head.split(' ').nth(1).unwrap().to_owned();
        if path == "/stream" {
            let length = field(&head, "content-length").unwrap();
            let answer = format!("HTTP/1.1 200 Fine\r\nContent-Length: {length}\r\n\r\n");
            stream.write_all(answer.as_bytes()).await?;
            let (mut read, mut write) = stream.split();
            tokio::io::copy(&mut read, &mut write).await?;
            return Ok(());
        }
        let (raw, body) = read_body(&mut stream, &head).await?;
        state.lock().unwrap().heard.push(head + &raw);
        if !answer(&mut stream, &path, &body).await? {
            return Ok(());
        }
    }
}

/// Sends a response; returns whether the connection stays open.
async fn answer(stream: &mut TcpStream, path: &str, body: &str) -> io::Result<bool> {
    let (text, goes_on): (String, bool) = match path {
        "/echo" => {
            let length = body.len();
            (
                format!("HTTP/1.1 200 Fine\r\nContent-Length: {length}\r\n\r\n{body}"),
                true,
            )
        }
        "/never" => std::future::pending().await,
        "/slow" => {
            sleep(Duration::from_millis(200)).await;
            (hello("Content-Length: 5\r\n"), true)
        }
        "/trailers" => {
            let head = "Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\n";
            (
                format!("HTTP/1.1 200 Fine\r\n{head}\r\n5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n"),
                true,
            )
        }
        "/close" => (hello(""), false),
        "/text-then-close" => (hello("Content-Length: 5\r\n"), false),
        "/head" => (
            "HTTP/1.1 200 Fine\r\nContent-Length: 5\r\n\r\n".to_owned(),
            true,
        ),
        "/204" => ("HTTP/1.1 204 None\r\n\r\n".to_owned(), true),
        "/304" => (
            "HTTP/1.1 304 Same\r\nContent-Length: 99\r\n\r\n".to_owned(),
            true,
        ),
        "/nothing" => (String::new(), false),
        "/half" => (hello("Content-Length: 9\r\n"), false),
        "/nonsense" => ("\0\0\r\n\r\n".to_owned(), false),
        "/101" => (
            "HTTP/1.1 101 Sure\r\nUpgrade: websocket\r\n\r\nhello".to_owned(),
            true,
        ),
        "/101-h2c" => (
            "HTTP/1.1 101 Sure\r\nUpgrade: h2c\r\n\r\nhello".to_owned(),
            true,
        ),
        "/endless" => loop {
            let head = hello("Content-Length: 999999999\r\n");
            stream.write_all(head.as_bytes()).await?;
            sleep(Duration::from_millis(1)).await;
        },
        "/switch" => {
            let head =
                "HTTP/1.1 101 Sure\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nfirst";
            stream.write_all(head.as_bytes()).await?;
            let (mut read, mut write) = stream.split();
            tokio::io::copy(&mut read, &mut write).await?;
            write.shutdown().await?;
            return Ok(false);
        }
        _ => (hello("Content-Length: 5\r\nX-SeRver: s\r\n"), true),
    };
    stream.write_all(text.as_bytes()).await?;
    Ok(goes_on)
}

fn hello(fields: &str) -> String {
    format!("HTTP/1.1 200 Fine\r\n{fields}\r\nhello")
}
