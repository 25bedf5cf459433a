//! `k8e sandbox run`: runs code or a shell command, in the session that runs share or in a given one.

use super::hosts;
use super::spec::SpecArgs;
use super::stream::{CommandArgs, Request};
use crate::failure::Failure;
use crate::output;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use k8e_model::{CODE_BYTES_MAX, Language, check_code};
use serde::Serialize;
use std::ffi::OsString;
use std::io::IsTerminal as _;
use tokio::io::AsyncReadExt as _;

/// First paragraphs of `k8e sandbox run --help`.
pub(super) const LONG_ABOUT: &str = "\
Run code, or a shell command, in a sandbox.

Without --session-id, a run reuses the session that an earlier run of yours created for the same tenant
with the same flags under \"New session\": files and installed packages persist. With other flags, or
when that session has ended, it creates one and reports \"session_created\":true. Sessions of `create`
and of other programs are used only with --session-id. The exit code is that of the command, also
with JSON output.";

/// Arguments of `k8e sandbox run`.
#[derive(Args, Debug)]
#[command(after_long_help = concat!("\
Examples:
  k8e sandbox run 'echo hello'
  k8e sandbox run 'print(6 * 7)' --lang python
  k8e sandbox run --lang python < script.py
  k8e sandbox run 'sort | uniq -c' --stdin --raw < words.txt
  k8e sandbox run 'make test' --raw --timeout 10m --memory 2GiB --fresh
  k8e sandbox run 'ls' --tenant my-project
  k8e sandbox run --background 'make test' | jq -r .run_id
  k8e sandbox run 'pip install requests' --fresh --allowed-hosts @python
  k8e sandbox run 'gh auth status' --secret GH_TOKEN=github:token

Output:
  {\"stdout\":\"hello\\n\",\"stderr\":\"\",\"exit_code\":0,\"session_id\":\"sess-…\",\"session_created\":true,
   \"status\":\"completed\",…}
  session_created is true when the session was created for this run: its files are new.
  status is completed, timed_out or oom_killed; limits_hit lists limits that were reached,
  egress_denied hosts that the session may not connect to.
  With --background: {\"run_id\":\"run-…\",\"status\":\"started\",\"session_id\":\"sess-…\",
  \"session_created\":true}; see `poll`, `runs` and `cancel`.

", hosts::help!()))]
pub struct RunArgs {
    /// The code; read from standard input when it is missing or `-`
    code: Option<OsString>,

    /// Language of the code: bash, python, node or ts
    #[arg(long, default_value = "bash", value_name = "LANGUAGE", value_parser = language)]
    lang: Language,

    /// Session to run in [default: the one that runs share, see above]
    #[arg(long, env = "K8E_SANDBOX_SESSION_ID", value_name = "ID")]
    session_id: Option<String>,

    /// Run in a new session that is destroyed afterwards
    #[arg(long)]
    fresh: bool,

    /// Return once it has started and leave it running; --timeout is then never unless set
    #[arg(long, conflicts_with_all = ["raw", "stdin", "fresh"])]
    background: bool,

    #[command(flatten)]
    command: CommandArgs,

    #[command(flatten)]
    spec: SpecArgs,
}

// === impl RunArgs ===

impl RunArgs {
    pub(crate) fn raw(&self) -> bool {
        self.command.raw()
    }

    pub(crate) fn background(&self) -> bool {
        self.background
    }

    /// Reads and validates the code and builds the request; sends nothing yet.
    pub(crate) async fn request(self) -> Result<Request, Failure> {
        // Not checked by clap: an empty environment variable counts as unset.
        let session_id = self.session_id.unwrap_or_default();
        if self.fresh && !session_id.is_empty() {
            return Err(Failure::request(
                format!(
                    "--fresh creates a new session: leave out --session-id {session_id}, or unset K8E_SANDBOX_SESSION_ID"
                ),
                "invalid",
            ));
        }
        if !session_id.is_empty() && !self.spec.allowed_hosts.is_empty() {
            return Err(Failure::request(
                format!(
                    "--allowed-hosts is for a new session: change that of {session_id} with `k8e sandbox allow-hosts`"
                ),
                "invalid",
            ));
        }
        if !session_id.is_empty() && !self.spec.secret.is_empty() {
            return Err(Failure::request(
                format!(
                    "--secret is for a new session: the secrets of {session_id} were set when it was created"
                ),
                "invalid",
            ));
        }
        let create = self.spec.request()?;
        let code = match self.code {
            Some(code) if code != "-" => code.into_encoded_bytes(),
            _ => read_code(self.command.stdin()).await?,
        };
        // The server checks it too, but only after all of it was sent.
        check_code(&code)?;
        let language = self.lang.as_str();
        let mut request = self.command.request();
        request.language = Some(language);
        request.start.session_id = session_id;
        request.start.fresh = self.fresh;
        request.start.create = Some(create);
        let code = v1::Code {
            language: language.to_owned(),
            code: code.into(),
        };
        request.start.program = Some(v1::run_start::Program::Code(code));
        Ok(request)
    }
}

/// JSON output, with the keys of the Go K8E.
#[derive(Serialize)]
struct StartedJson {
    run_id: String,
    status: &'static str,
    session_id: String,
    session_created: bool,
}

pub(crate) async fn start(request: Request, mut client: Client) -> Result<u8, Failure> {
    let run = client.start_run(request.start).await?.into_inner();
    output::json(&StartedJson {
        run_id: run.run_id,
        status: "started",
        session_id: run.session_id,
        session_created: run.session_created,
    })
    .map(|()| 0)
}

fn language(text: &str) -> Result<Language, k8e_model::Error> {
    text.parse()
}

async fn read_code(stdin_is_the_commands: bool) -> Result<Vec<u8>, Failure> {
    if stdin_is_the_commands {
        return Err(Failure::request(
            "standard input cannot be both the code and the command's input: give the code as an argument",
            "invalid",
        ));
    }
    let mut code = Vec::new();
    // At a terminal the code was forgotten: an error about empty code is better than waiting for input.
    if !std::io::stdin().is_terminal() {
        // One byte more than the limit is enough to detect that it is exceeded.
        let limit = CODE_BYTES_MAX as u64 + 1;
        tokio::io::stdin()
            .take(limit)
            .read_to_end(&mut code)
            .await
            .map_err(|e| Failure::io("read the code from standard input", &e))?;
    }
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: RunArgs,
    }

    async fn request(session_id: &str, hosts: &[&str]) -> Result<Request, Failure> {
        let line = ["run", "true", "--session-id", session_id].into_iter();
        let hosts = hosts.iter().flat_map(|host| ["--allowed-hosts", *host]);
        let line = Line::try_parse_from(line.chain(hosts)).unwrap();
        line.args.request().await
    }

    #[tokio::test]
    async fn hosts_are_for_a_new_session() {
        let asked = request("", &["@python,a.example", "b.example"]).await;
        let hosts = asked.unwrap().start.create.unwrap().allowed_hosts;
        assert_eq!(hosts, ["@python", "a.example", "b.example"]);
        assert!(request("s", &[]).await.is_ok());
        assert_eq!(request("s", &["none"]).await.unwrap_err().exit(), 1);
        assert_eq!(request("", &["a b"]).await.unwrap_err().exit(), 1);
    }
}
