//! Credentials for registries, as `docker login` writes them, or from the credential helper that Docker's
//! configuration names. A helper runs as the user who runs this command, never on the server.

use crate::failure::Failure;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8e_api::v1;
use serde::Deserialize;
use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Of Docker's configuration.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// Docker's own names for Docker Hub.
const DOCKER_HUB: &str = "docker.io";
const DOCKER_HUB_KEY: &str = "https://index.docker.io/v1/";

/// Of what a helper answers.
const ANSWER_BYTES_MAX: u64 = 64 * 1024;

/// A helper's program is this and its name.
const HELPER: &str = "docker-credential-";

/// The user of a helper's answer that is a token for another protocol.
const IDENTITY_TOKEN: &str = "<token>";

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct DockerConfig {
    auths: HashMap<String, Auth>,
    /// Registries and the helpers for them.
    cred_helpers: HashMap<String, String>,
    /// The helper for all others.
    creds_store: String,
}

/// What Docker's configuration has for a registry.
#[derive(Debug, PartialEq)]
enum Found {
    Nothing,
    Credentials(v1::RegistryCredentials),
    Helper {
        name: String,
        /// What it knows the registry by.
        key: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperAnswer {
    username: String,
    secret: String,
}

#[derive(Deserialize)]
struct Auth {
    #[serde(default)]
    auth: String,
}

/// Those for a registry; none when there are none. A file that is there and cannot be read is an error:
/// the registry would only say that it wants a login.
pub(super) fn find(registry: &str) -> Result<Option<v1::RegistryCredentials>, Failure> {
    let dir = std::env::var_os("DOCKER_CONFIG").filter(|dir| !dir.is_empty());
    let dir = dir
        .map(PathBuf::from)
        .or_else(|| Some(std::env::home_dir()?.join(".docker")));
    let Some(path) = dir.map(|dir| dir.join("config.json")) else {
        return Ok(None);
    };
    match std::fs::metadata(&path) {
        Ok(meta) if meta.len() <= FILE_BYTES_MAX => {}
        Ok(_) => return Err(unreadable(&path, "it is too large")),
        Err(_) => return Ok(None),
    }
    let text = std::fs::read(&path).map_err(|error| unreadable(&path, &error.to_string()))?;
    match parse(&text, registry).map_err(|error| unreadable(&path, &error))? {
        Found::Nothing => Ok(None),
        Found::Credentials(credentials) => Ok(Some(credentials)),
        Found::Helper { name, key } => {
            let program = format!("{HELPER}{name}");
            let asked = ask(Command::new(&program), &key);
            asked.map_err(|why| {
                let why = format!("{program}, which {} names, {why}", path.display());
                Failure::request(why, "local")
            })
        }
    }
}

/// Asks a helper for the credentials that it has for `key`; none when it has none.
fn ask(mut helper: Command, key: &str) -> Result<Option<v1::RegistryCredentials>, String> {
    let started = helper
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn();
    let mut child = started.map_err(|error| format!("cannot be started: {error}"))?;
    // One that does not read has its answer anyway.
    let _ = child
        .stdin
        .take()
        .map(|mut stdin| stdin.write_all(key.as_bytes()));
    let mut said = Vec::new();
    let read = child.stdout.take().map_or(Ok(0), |out| {
        out.take(ANSWER_BYTES_MAX + 1).read_to_end(&mut said)
    });
    if said.len() as u64 > ANSWER_BYTES_MAX {
        let _ = child.kill();
    }
    let ended = child.wait();
    read.map_err(|error| format!("cannot be read: {error}"))?;
    let ended = ended.map_err(|error| format!("cannot be waited for: {error}"))?;
    if !ended.success() {
        // It says so on standard output, and has no exit status of its own for it.
        let said = String::from_utf8_lossy(&said).to_lowercase();
        return match said.contains("not found") {
            true => Ok(None),
            false => Err(format!("failed: {ended}")),
        };
    }
    // What it says is secret: not shown.
    let bad = |_| "did not answer with a user and a secret".to_owned();
    let answer: HelperAnswer = serde_json::from_slice(&said).map_err(bad)?;
    if answer.username == IDENTITY_TOKEN {
        return Err("has an identity token, which is not supported: log in with a password or an access token".to_owned());
    }
    Ok(Some(v1::RegistryCredentials {
        username: answer.username,
        password: answer.secret,
    }))
}

/// A helper's name is part of a program's name, and not a path.
fn is_helper(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && name.chars().all(plain)
}

fn parse(text: &[u8], registry: &str) -> Result<Found, String> {
    let config: DockerConfig = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let https = format!("https://{registry}");
    let hub = (registry == DOCKER_HUB).then_some(DOCKER_HUB_KEY);
    let keys = [Some(registry), Some(https.as_str()), hub];
    let helper = keys
        .into_iter()
        .flatten()
        .find_map(|key| config.cred_helpers.get(key));
    let helper = helper.unwrap_or(&config.creds_store);
    let auth = keys
        .into_iter()
        .flatten()
        .find_map(|key| config.auths.get(key));
    let Some(auth) = auth.filter(|auth| !auth.auth.is_empty()) else {
        if helper.is_empty() {
            return Ok(Found::Nothing);
        }
        if !is_helper(helper) {
            return Err(format!("{helper:?} is not the name of a credential helper"));
        }
        return Ok(Found::Helper {
            name: helper.clone(),
            key: hub.unwrap_or(registry).to_owned(),
        });
    };
    let pair = STANDARD.decode(auth.auth.trim()).ok();
    let pair = pair.and_then(|pair| String::from_utf8(pair).ok());
    let (username, password) = pair
        .as_deref()
        .and_then(|pair| pair.split_once(':'))
        .ok_or_else(|| format!("what it has for {registry} is not a user and a password"))?;
    Ok(Found::Credentials(v1::RegistryCredentials {
        username: username.to_owned(),
        password: password.trim_end_matches('\0').to_owned(),
    }))
}

fn unreadable(path: &std::path::Path, why: &str) -> Failure {
    Failure::request(format!("cannot read {}: {why}", path.display()), "local")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credentials(username: &str, password: &str) -> v1::RegistryCredentials {
        v1::RegistryCredentials {
            username: username.to_owned(),
            password: password.to_owned(),
        }
    }

    #[test]
    fn what_docker_wrote_is_read() {
        let text = format!(
            r#"{{"auths":{{"registry.example:5000":{{"auth":"{}"}},"{DOCKER_HUB_KEY}":{{"auth":"{}"}},"empty.example":{{}},"bad.example":{{"auth":"?"}}}}}}"#,
            STANDARD.encode("ann:pa:ss"),
            STANDARD.encode("hub:pw"),
        );
        let found = |registry| parse(text.as_bytes(), registry);
        assert_eq!(
            found("registry.example:5000").unwrap(),
            Found::Credentials(credentials("ann", "pa:ss"))
        );
        assert_eq!(
            found("docker.io").unwrap(),
            Found::Credentials(credentials("hub", "pw"))
        );
        assert_eq!(found("other.example").unwrap(), Found::Nothing);
        assert_eq!(found("empty.example").unwrap(), Found::Nothing);
        assert!(found("bad.example").is_err());
        assert!(parse(b"[", "x").is_err());
    }

    #[test]
    fn helpers_are_chosen_as_docker_does() {
        let text = br#"{"auths":{"own.example":{}},"credHelpers":{"gcr.example":"gcloud"},"credsStore":"pass"}"#;
        let helper = |name: &str, key: &str| Found::Helper {
            name: name.to_owned(),
            key: key.to_owned(),
        };
        let found = |registry| parse(text, registry).unwrap();
        assert_eq!(found("gcr.example"), helper("gcloud", "gcr.example"));
        assert_eq!(found("own.example"), helper("pass", "own.example"));
        assert_eq!(found("docker.io"), helper("pass", DOCKER_HUB_KEY));
        for bad in ["../evil", "a/b", "a b", "$(x)"] {
            let text = serde_json::json!({ "credsStore": bad }).to_string();
            assert!(parse(text.as_bytes(), "x").is_err(), "{bad}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_helper_is_asked_and_its_answer_checked() {
        let asked = |script: &str| {
            let mut helper = Command::new("sh");
            helper.args(["-c", script, "helper"]);
            ask(helper, "registry.example")
        };
        // The protocol: `get`, the registry on standard input, JSON on standard output.
        let script = r#"[ "$1" = get ] && read -r key; printf '{"ServerURL":"%s","Username":"ann","Secret":"for %s"}' "$key" "$key""#;
        let want = credentials("ann", "for registry.example");
        assert_eq!(asked(script).unwrap(), Some(want));
        let none = asked("echo 'credentials not found in native keychain'; exit 1");
        assert_eq!(none.unwrap(), None);
        assert!(asked("echo locked; exit 1").is_err());
        assert!(asked("echo '{\"Username\":1}'").is_err());
        assert!(asked("yes").is_err(), "an answer without end");
        let token = asked(r#"echo '{"Username":"<token>","Secret":"s3cret"}'"#).unwrap_err();
        assert!(token.contains("identity token") && !token.contains("s3cret"));
        let missing = ask(Command::new("/no/such/helper"), "x").unwrap_err();
        assert!(missing.contains("cannot be started"), "{missing}");
    }
}
