//! `k8e login`: exchanges an API key for a client certificate.

use crate::Globals;
use crate::connect;
use crate::failure::Failure;
use crate::output;
use clap::Args;
use k8e_api::client::{Client, Endpoint};
use k8e_api::v1;
use rcgen::{CertificateParams, KeyPair};
use serde::Serialize;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// First paragraphs of `k8e login --help`.
pub(crate) const LONG_ABOUT: &str = "\
Get a client certificate for an API key, and store it in --cert-dir.

The private key is generated here and never leaves this machine. Afterwards commands with this endpoint
need no API key; deleting the API key on the server revokes the certificate too. The server's
certificate is verified with ca.crt in that directory: copy it from <data-dir>/tls/sandbox-ca.crt on
the server, over a channel that you trust.";

/// Arguments of `k8e login`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  export K8E_SANDBOX_ENDPOINT=sandboxes.example.com
  K8E_SANDBOX_APIKEY=k8e_… k8e login && k8e sandbox status")]
pub struct LoginArgs {
    /// Name of this machine in the server's audit log [default: its host name]
    #[arg(long, env = "K8E_SANDBOX_DEVICE_NAME", value_name = "NAME")]
    device_name: Option<String>,
}

#[derive(Serialize)]
struct LoginJson {
    ok: bool,
    cert_dir: PathBuf,
    valid_days: i64,
}

pub(crate) async fn run(args: LoginArgs, globals: &Globals) -> Result<u8, Failure> {
    let endpoint = connect::login_endpoint(globals)?;
    let Endpoint::Tls(tls) = &endpoint else {
        return Err(Failure::request(
            "the socket needs no login: name a server on TCP with --endpoint",
            "invalid",
        ));
    };
    if tls.api_key.is_none() && tls.identity.is_none() {
        return Err(Failure::request(
            "log in with an API key: --apikey, or K8E_SANDBOX_APIKEY",
            "invalid",
        ));
    }
    let dir = connect::own_cert_dir(globals);
    let failed = |e: rcgen::Error| Failure::request(format!("cannot make a key: {e}"), "local");
    let key = KeyPair::generate().map_err(failed)?;
    let csr = CertificateParams::default()
        .serialize_request(&key)
        .and_then(|csr| csr.pem())
        .map_err(failed)?;
    let request = v1::LoginRequest {
        csr,
        device_name: args.device_name.unwrap_or_else(host_name),
        client_version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let mut client = Client::connect(&endpoint).await?;
    let given = client.identity.login(request).await?.into_inner();
    let write = |name: &str, text: &str| {
        write_private(&dir, name, text)
            .map_err(|e| Failure::io(&format!("write {}", dir.join(name).display()), &e))
    };
    write("client.key", &key.serialize_pem())?;
    write("client.crt", &given.cert)?;
    write("ca.crt", &given.ca_cert)?;
    output::json(&LoginJson {
        ok: true,
        cert_dir: dir,
        valid_days: given.valid_days,
    })?;
    Ok(0)
}

/// Writes a file atomically, readable by this user only.
fn write_private(dir: &Path, name: &str, text: &str) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    // Mode 0600 on Unix.
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(dir.join(name)).map_err(|e| e.error)?;
    Ok(())
}

#[cfg(target_os = "linux")]
fn host_name() -> String {
    let uname = rustix::system::uname();
    uname.nodename().to_string_lossy().into_owned()
}

#[cfg(not(target_os = "linux"))]
fn host_name() -> String {
    let name = |variable| std::env::var(variable).ok();
    name("HOSTNAME")
        .or_else(|| name("COMPUTERNAME"))
        .unwrap_or_default()
}
