//! `k8e e2b env`: the environment variables that make E2B's clients use this server.

use crate::failure::Failure;
use crate::output;
use crate::{Globals, KeyArg, connect};
use clap::{Args, Subcommand, ValueEnum};
use k8e_api::v1;
use k8e_model::ApiKey;
use serde::Serialize;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

/// First paragraphs of `k8e e2b --help`.
pub(crate) const LONG_ABOUT: &str = "\
Use E2B's clients with k8e. They are configured by environment variables alone:

  eval \"$(k8e e2b env --new-key me)\"
  python3 -c 'from e2b import Sandbox; print(Sandbox.create().commands.run(\"echo hi\").stdout)'";

/// Where `k8e server` answers E2B's clients, unless --e2b-listen says otherwise.
const URL_DEFAULT: &str = "http://127.0.0.1:3676";

/// Longest wait for a connection to the URL: only a hint depends on it.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// The commands of `k8e e2b`.
#[derive(Subcommand, Debug)]
pub enum E2bCommand {
    /// Print the environment variables of E2B's clients, for eval
    Env(EnvArgs),
}

/// Arguments of `k8e e2b env`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Without --new-key and --key it is the key of --apikey or K8E_SANDBOX_APIKEY.

Examples:
  eval \"$(k8e e2b env --new-key me)\"
  eval \"$(k8e e2b env --key $KEY --url https://k8e.example.com)\"
  k8e e2b env --new-key me --shell fish | source
  k8e e2b env --new-key me --shell json | jq -r .E2B_API_KEY

Output:
  export E2B_API_URL='http://127.0.0.1:3676'
  export E2B_SANDBOX_URL='http://127.0.0.1:3676'
  export E2B_API_KEY='e2b_…'")]
pub struct EnvArgs {
    /// Create an API key of this name; it is in the output, and is not shown again
    #[arg(long, value_name = "NAME", conflicts_with = "key")]
    new_key: Option<String>,

    /// Use this API key; the prefix k8e_ or e2b_ makes no difference
    #[arg(long, value_name = "KEY", value_parser = KeyArg::parse)]
    key: Option<KeyArg>,

    /// URL of the server's E2B API, as `k8e server --e2b-listen` serves it or a proxy in front of it
    #[arg(long, default_value = URL_DEFAULT, value_parser = url)]
    url: String,

    /// Syntax of the output
    #[arg(long, value_enum, default_value = "sh")]
    shell: Shell,
}

/// Syntax of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Shell {
    /// sh, bash and zsh
    Sh,
    /// fish
    Fish,
    /// One JSON object
    Json,
}

#[derive(Serialize)]
struct EnvJson<'a> {
    #[serde(rename = "E2B_API_URL")]
    api_url: &'a str,
    #[serde(rename = "E2B_SANDBOX_URL")]
    sandbox_url: &'a str,
    #[serde(rename = "E2B_API_KEY")]
    api_key: &'a str,
}

// === impl E2bCommand ===

impl E2bCommand {
    /// Whether standard output is JSON; errors are printed as JSON then too.
    pub(crate) fn prints_json(&self) -> bool {
        let Self::Env(args) = self;
        args.shell == Shell::Json
    }
}

pub(crate) async fn run(command: E2bCommand, globals: &Globals) -> Result<u8, Failure> {
    let E2bCommand::Env(args) = command;
    let given = args.key.or_else(|| globals.apikey.clone());
    let given = given.and_then(|key| key.0);
    let key = match (&args.new_key, given) {
        (Some(name), _) => new_key(name, globals).await?,
        (None, Some(key)) => key,
        (None, None) => {
            let error =
                "E2B's clients need an API key: --new-key NAME creates one, --key KEY uses one";
            return Err(Failure::request(error, "invalid"));
        }
    };
    if !answers(&args.url) {
        output::note(&format!(
            "nothing answers at {}: `k8e server --e2b-listen` sets the address, --url names another",
            args.url
        ));
    }
    let key = key.reveal();
    let key = format!("e2b_{}", key.trim_start_matches("k8e_"));
    output::text(render(&args.url, &key, args.shell)?.as_bytes()).map(|()| 0)
}

async fn new_key(name: &str, globals: &Globals) -> Result<ApiKey, Failure> {
    let mut client = connect::connect(globals).await?;
    let request = v1::CreateKeyRequest {
        name: name.to_owned(),
        ..Default::default()
    };
    let made = client.identity.create_key(request).await?.into_inner();
    Ok(ApiKey::parse(&made.secret)?)
}

/// Neither value has a character that a shell interprets within single quotes: see [`url`] and [`ApiKey::parse`].
fn render(url: &str, key: &str, shell: Shell) -> Result<String, Failure> {
    let values = [
        ("E2B_API_URL", url),
        ("E2B_SANDBOX_URL", url),
        ("E2B_API_KEY", key),
    ];
    let lines =
        |syntax: fn(&str, &str) -> String| values.map(|(name, value)| syntax(name, value)).concat();
    match shell {
        Shell::Sh => Ok(lines(|name, value| format!("export {name}='{value}'\n"))),
        Shell::Fish => Ok(lines(|name, value| format!("set -gx {name} '{value}';\n"))),
        Shell::Json => {
            let json = EnvJson {
                api_url: url,
                sandbox_url: url,
                api_key: key,
            };
            let json = serde_json::to_string(&json).map_err(std::io::Error::other);
            let json = json.map_err(|e| Failure::io("render the answer", &e))?;
            Ok(format!("{json}\n"))
        }
    }
}

/// Parses a URL of an HTTP server: no slash at its end, which E2B's clients do not take, and nothing to be quoted.
fn url(text: &str) -> Result<String, String> {
    let wrong =
        || format!("{text:?} is not a URL of a server: write {URL_DEFAULT} or https://host");
    let trimmed = text.trim_end_matches('/');
    let authority = trimmed
        .strip_prefix("http://")
        .or_else(|| trimmed.strip_prefix("https://"))
        .ok_or_else(wrong)?;
    let is_plain = |char: char| char.is_ascii_alphanumeric() || ".-_:[]/~".contains(char);
    match !authority.is_empty() && authority.chars().all(is_plain) {
        true => Ok(trimmed.to_owned()),
        false => Err(wrong()),
    }
}

/// Whether something accepts connections there.
fn answers(url: &str) -> bool {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    let authority = rest.split('/').next().unwrap_or_default();
    let port = if scheme == "https" { 443 } else { 80 };
    let host_end = authority.rfind(']').map_or(0, |end| end + 1);
    let authority = match authority[host_end..].contains(':') {
        true => authority.to_owned(),
        false => format!("{authority}:{port}"),
    };
    let addresses = authority.to_socket_addrs();
    addresses.is_ok_and(|mut found| {
        found.any(|address| TcpStream::connect_timeout(&address, PROBE_TIMEOUT).is_ok())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked_and_need_no_quotes() {
        assert_eq!(
            url("http://127.0.0.1:3676/").unwrap(),
            "http://127.0.0.1:3676"
        );
        assert_eq!(url("https://[::1]:1/e2b").unwrap(), "https://[::1]:1/e2b");
        for bad in [
            "",
            "host:1",
            "ftp://a",
            "http://",
            "http://a'b",
            "http://a b",
            "http://a$(id)",
            "http://a\n",
        ] {
            assert!(url(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn each_shell_has_its_syntax() {
        let text = |shell| render("http://a:1", "e2b_00", shell).unwrap();
        assert_eq!(
            text(Shell::Sh),
            "export E2B_API_URL='http://a:1'\nexport E2B_SANDBOX_URL='http://a:1'\nexport E2B_API_KEY='e2b_00'\n"
        );
        assert!(text(Shell::Fish).starts_with("set -gx E2B_API_URL 'http://a:1';\n"));
        assert_eq!(
            text(Shell::Json),
            "{\"E2B_API_URL\":\"http://a:1\",\"E2B_SANDBOX_URL\":\"http://a:1\",\"E2B_API_KEY\":\"e2b_00\"}\n"
        );
    }

    #[test]
    fn a_listener_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert!(answers(&format!("http://{address}/path")));
        drop(listener);
        assert!(!answers(&format!("http://{address}")));
    }
}
