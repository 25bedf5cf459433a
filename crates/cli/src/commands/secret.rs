//! `k8e secret`: sets, lists and deletes secrets for the environment of commands.

use crate::failure::Failure;
use crate::output;
use crate::tty;
use clap::{Args, Subcommand};
use k8e_api::client::Client;
use k8e_api::convert;
use k8e_api::v1;
use serde::Serialize;
use std::io::IsTerminal as _;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};

/// Bound for reading a value: larger than the server's limit, so that a long value is refused and not cut.
const READ_BYTES_MAX: u64 = 1024 * 1024;

/// First paragraphs of `k8e secret --help`.
pub(crate) const LONG_ABOUT: &str = "\
Set, list and delete secrets: values that commands in a sandbox get as environment variables.

A secret has a name and one or several values, each with a key. It is owned by the principal that sets
it. No command and no call returns a value; the server stores it encrypted. A session is created with
references to secrets, and a command gets their values at the time it starts:

  printf %s \"$TOKEN\" | k8e secret set github:token
  k8e sandbox run 'gh auth status' --secret GH_TOKEN=github:token

Code in the sandbox can read and print these values: give it as little as it needs.";

/// The commands of `k8e secret`.
#[derive(Subcommand, Debug)]
pub enum SecretCommand {
    /// Set a secret to the content of standard input, at a terminal to one line that is not echoed; a
    /// trailing newline is removed
    Set(SetArgs),
    /// List secrets, without their values
    List,
    /// Delete a secret, or one of its values
    Delete(DeleteArgs),
}

/// Arguments of `k8e secret set`.
#[derive(Args, Debug)]
pub struct SetArgs {
    /// Name of the secret, or NAME:KEY for one of several values
    #[arg(value_name = "NAME[:KEY]")]
    secret: String,

    /// Keep a trailing newline
    #[arg(long)]
    exact: bool,

    /// Owner of the secret, another principal than the caller; for root on the server's Unix socket only [default: the
    /// caller]
    #[arg(long, value_name = "NAME")]
    principal: Option<String>,
}

/// Arguments of `k8e secret delete`.
#[derive(Args, Debug)]
pub struct DeleteArgs {
    /// Name of the secret, for all its values, or NAME:KEY
    #[arg(value_name = "NAME[:KEY]")]
    secret: String,

    /// Owner of the secret, another principal than the caller; for root on the server's Unix socket only [default: the
    /// caller]
    #[arg(long, value_name = "NAME")]
    principal: Option<String>,
}

#[derive(Serialize)]
struct SecretsJson {
    secrets: Vec<SecretJson>,
}

#[derive(Serialize)]
struct SecretJson {
    name: String,
    key: String,
    owner: String,
    updated_at: i64,
}

#[derive(Serialize)]
struct DoneJson {
    ok: bool,
    name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    key: String,
}

/// The validated request.
pub(crate) enum Request {
    Set(v1::SetSecretRequest),
    List,
    Delete(v1::DeleteSecretRequest),
}

// === impl SecretCommand ===

impl SecretCommand {
    pub(crate) async fn request(self) -> Result<Request, Failure> {
        match self {
            Self::Set(args) => {
                let (name, key) = named(&args.secret);
                convert::secret_name(&name, &key)?;
                let value = read_value(&args.secret, args.exact).await?;
                // Validated before anything is sent.
                convert::secret_value(value.clone().into())?;
                Ok(Request::Set(v1::SetSecretRequest {
                    name,
                    key,
                    value: value.into(),
                    principal: args.principal.unwrap_or_default(),
                }))
            }
            Self::List => Ok(Request::List),
            Self::Delete(args) => {
                let (name, key) = named(&args.secret);
                convert::secret_name(&name, &key)?;
                Ok(Request::Delete(v1::DeleteSecretRequest {
                    name,
                    key,
                    principal: args.principal.unwrap_or_default(),
                }))
            }
        }
    }
}

pub(crate) async fn run(request: Request, mut client: Client) -> Result<u8, Failure> {
    let secrets = &mut client.secrets;
    match request {
        Request::Set(request) => {
            let (name, key) = (request.name.clone(), request.key.clone());
            secrets.set_secret(request).await?;
            output::json(&DoneJson {
                ok: true,
                name,
                key,
            })?;
        }
        Request::List => {
            let listed = secrets.list_secrets(v1::ListSecretsRequest {}).await?;
            let listed = listed.into_inner().secrets.into_iter();
            let listed = listed.map(|entry| SecretJson {
                name: entry.name,
                key: entry.key,
                owner: entry.owner,
                updated_at: entry.updated_at_unix_ms / 1000,
            });
            output::json(&SecretsJson {
                secrets: listed.collect(),
            })?;
        }
        Request::Delete(request) => {
            let (name, key) = (request.name.clone(), request.key.clone());
            secrets.delete_secret(request).await?;
            output::json(&DoneJson {
                ok: true,
                name,
                key,
            })?;
        }
    }
    Ok(0)
}

/// `NAME` or `NAME:KEY`.
pub(super) fn named(text: &str) -> (String, String) {
    let (name, key) = text.split_once(':').unwrap_or((text, ""));
    (name.to_owned(), key.to_owned())
}

/// Reads all of standard input; at a terminal one line, without echo.
async fn read_value(secret: &str, exact: bool) -> Result<Vec<u8>, Failure> {
    let mut value = Vec::new();
    let stdin = tokio::io::stdin().take(READ_BYTES_MAX);
    let read = if std::io::stdin().is_terminal() {
        let _hidden = tty::NoEcho::enter()?;
        output::prompt(&format!("value of {secret} (not shown; Enter ends it): "));
        let mut line = BufReader::new(stdin);
        let read = line.read_until(b'\n', &mut value).await;
        // The newline was not echoed either.
        output::prompt("\n");
        read
    } else {
        let mut stdin = stdin;
        stdin.read_to_end(&mut value).await
    };
    read.map_err(|e| Failure::io("read the value from standard input", &e))?;
    if !exact && value.ends_with(b"\n") {
        value.pop();
        if value.ends_with(b"\r") {
            value.pop();
        }
    }
    Ok(value)
}
