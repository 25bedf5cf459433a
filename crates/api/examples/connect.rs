//! Connects to a server and asks for its version, its runtimes and its sessions.
//!
//! `cargo run -p k8e-api --example connect [SOCKET]`
#![expect(clippy::print_stdout, reason = "an example that shows what it got")]

use k8e_api::client::{Client, Endpoint};
use k8e_api::v1;
use std::error::Error;
use std::path::PathBuf;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let socket = std::env::args_os().nth(1);
    let socket = socket.map_or_else(|| PathBuf::from("/var/lib/k8e/k8e.sock"), PathBuf::from);
    println!("{}", connect(socket).await?);
    Ok(())
}

/// A server on this machine is reached over its Unix socket, and knows its clients by their user id.
/// `Endpoint::Tls` is for one elsewhere: its certificate authority, and a certificate or an API key.
pub(crate) async fn connect(socket: PathBuf) -> Result<String, Box<dyn Error>> {
    let mut client = Client::connect(&Endpoint::Unix(socket)).await?;
    let status = client
        .get_status(v1::GetStatusRequest {})
        .await?
        .into_inner();
    let usable = status.runtimes.iter().filter(|runtime| runtime.usable);
    let usable: Vec<&str> = usable.map(|runtime| runtime.name.as_str()).collect();
    Ok(format!(
        "k8e {}, runtimes: {} (default {}), {} of {} sessions",
        status.version,
        usable.join(", "),
        status.default_runtime,
        status.sessions_active,
        status.sessions_max
    ))
}
