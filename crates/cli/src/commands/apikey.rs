//! `k8e apikey`: creates, lists and deletes API keys, and revokes client certificates.

use crate::failure::Failure;
use crate::output;
use crate::units::{self, Span};
use clap::{Args, Subcommand};
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;

/// First paragraphs of `k8e apikey --help`.
pub(crate) const LONG_ABOUT: &str = "\
Create, list and delete API keys.

An API key authenticates a principal, which owns the sessions and secrets that it creates and sees no
others. It creates sessions only for the tenants of its key, so that the deny-list (`k8e server
--denied-hosts TENANT=HOST`) and the quota (--max-sessions-per-tenant) of a tenant apply to it. Keys
with the same --principal see each other's sessions, whatever their tenants.

A key is shown once, when it is created; the server stores only a hash. Clients send it with every
call (K8E_SANDBOX_APIKEY), or exchange it for a client certificate with `k8e login`. Deleting a key
revokes both at once. Only root and members of the group k8e, on the server itself, may use these
commands.";

/// The commands of `k8e apikey`.
#[derive(Subcommand, Debug)]
pub enum ApikeyCommand {
    /// Create a key and print it; it is not shown again
    Create(CreateArgs),
    /// List the keys: id, name, principal, tenants, times; not the keys themselves
    List,
    /// Delete a key, and revoke the certificates issued for it
    Delete(DeleteArgs),
    /// Revoke one client certificate, as that of a lost device
    RevokeCertificate(RevokeArgs),
}

/// Arguments of `k8e apikey create`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e apikey create ann --expires 90d | jq -r .key
  k8e apikey create ann-laptop --principal ann     # sees what ann's other keys see
  k8e apikey create ci --tenant builds --tenant tests
  k8e apikey create platform --tenant '*'          # creates sessions for any tenant")]
pub struct CreateArgs {
    /// Name of the key, unique on this server
    name: String,

    /// Validity of the key, as 30d, or never [default: never]
    #[arg(long, alias = "ttl", value_name = "TIME", value_parser = units::span)]
    expires: Option<Span>,

    /// Principal that the key authenticates [default: one named like the key]
    #[arg(long, value_name = "NAME")]
    principal: Option<String>,

    /// Tenant that the key may create sessions for; may be repeated, the first is the default of its requests.
    /// '*' alone is any tenant [default: one named like the key]
    #[arg(long = "tenant", value_name = "NAME")]
    tenants: Vec<String>,
}

/// Arguments of `k8e apikey delete`.
#[derive(Args, Debug)]
pub struct DeleteArgs {
    /// Id or name of the key
    id: String,
}

/// Arguments of `k8e apikey revoke-certificate`.
#[derive(Args, Debug)]
pub struct RevokeArgs {
    /// Serial number of the certificate, as `k8e audit` shows it for the login, or `openssl x509 -serial`
    serial: String,
}

#[derive(Serialize)]
struct KeysJson {
    keys: Vec<KeyJson>,
}

/// Times are Unix seconds; `None` is never.
#[derive(Serialize)]
struct KeyJson {
    id: String,
    name: String,
    principal: String,
    /// Tenants that it may create sessions for, the default first; `*` is any.
    tenants: Vec<String>,
    created_at: i64,
    expires_at: Option<i64>,
    last_used: Option<i64>,
    expired: bool,
}

/// Output of `create`, the only time that a key is shown; `e2b_key` has the prefix that E2B clients require.
#[derive(Serialize)]
struct MadeJson {
    #[serde(flatten)]
    about: KeyJson,
    key: String,
    e2b_key: String,
}

#[derive(Serialize)]
struct DoneJson {
    ok: bool,
    #[serde(flatten)]
    key: Option<KeyJson>,
}

pub(crate) async fn run(command: ApikeyCommand, mut client: Client) -> Result<u8, Failure> {
    let identity = &mut client.identity;
    match command {
        ApikeyCommand::Create(args) => {
            let request = v1::CreateKeyRequest {
                name: args.name,
                principal: args.principal.unwrap_or_default(),
                tenants: args.tenants,
                expires_in_s: args
                    .expires
                    .and_then(Span::into_option)
                    .map_or(0, |time| Span::For(time).wire_seconds()),
            };
            let made = identity.create_key(request).await?.into_inner();
            let digits = made.secret.trim_start_matches("k8e_");
            output::json(&MadeJson {
                about: made.key.unwrap_or_default().into(),
                e2b_key: format!("e2b_{digits}"),
                key: made.secret,
            })?;
        }
        ApikeyCommand::List => {
            let listed = identity.list_keys(v1::ListKeysRequest {}).await?;
            let keys = listed.into_inner().keys.into_iter().map(KeyJson::from);
            output::json(&KeysJson {
                keys: keys.collect(),
            })?;
        }
        ApikeyCommand::Delete(args) => {
            let request = v1::DeleteKeyRequest { id: args.id };
            let deleted = identity.delete_key(request).await?.into_inner();
            output::json(&DoneJson {
                ok: true,
                key: deleted.key.map(KeyJson::from),
            })?;
        }
        ApikeyCommand::RevokeCertificate(args) => {
            let serial = args.serial.trim_start_matches("serial=").to_owned();
            let request = v1::RevokeCertificateRequest { serial };
            identity.revoke_certificate(request).await?;
            output::json(&DoneJson {
                ok: true,
                key: None,
            })?;
        }
    }
    Ok(0)
}

// === impl KeyJson ===

impl From<v1::Key> for KeyJson {
    fn from(key: v1::Key) -> Self {
        let seconds = |ms: i64| (ms > 0).then_some(ms / 1000);
        Self {
            id: key.id,
            name: key.name,
            principal: key.principal,
            tenants: key.tenants,
            created_at: key.created_at_unix_ms / 1000,
            expires_at: seconds(key.expires_at_unix_ms),
            last_used: seconds(key.last_used_unix_ms),
            expired: key.expired,
        }
    }
}
