//! `k8e doctor`: what is wrong between this client and its server, and how to fix it.

use crate::failure::Failure;
use crate::{Globals, block_on_to_the_end, connect, output, skill};
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

/// What `k8e doctor --help` begins with.
pub const LONG_ABOUT: &str = "\
Check the connection from this client to its server, the server, and, where the server is on this
machine, the machine itself. Each problem is printed with what to do about it. Changes nothing, and
starts no server.

The exit code is 0 when there is no problem, and 1 otherwise.";

/// Longest wait for an answer of the server.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Arguments of `k8e doctor`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Output with --json:
  {\"ok\":false,\"problems\":1,\"checks\":[{\"name\":\"connection\",\"ok\":false,\"detail\":\"…\",\"fix\":\"…\"}]}

Examples:
  k8e doctor
  sudo k8e doctor                     # checks the machine too
  k8e doctor --json | jq -r '.checks[] | select(.ok | not) | .fix'")]
pub struct DoctorArgs {
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// Whether there is nothing to do.
    pub ok: bool,
    /// What was found.
    pub detail: String,
    /// What to do; empty when there is nothing to do.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub fix: String,
}

#[derive(Serialize)]
struct ReportJson<'a> {
    ok: bool,
    problems: usize,
    checks: &'a [Check],
}

/// Whether the server is meant to be on this machine, so that the machine is worth a check.
pub fn is_local(globals: &Globals) -> bool {
    connect::describe(globals).is_ok_and(|(_, is_local)| is_local)
}

/// Checks endpoint, connection, server and installed skills. `whole` builds the complete clap command.
pub fn check_client(globals: &Globals, whole: fn() -> clap::Command) -> Vec<Check> {
    let mut checks = Vec::new();
    let is_local = match connect::describe(globals) {
        Ok((address, is_local)) => {
            checks.push(Check::ok("endpoint", address));
            is_local
        }
        Err(failure) => {
            checks.push(Check::failed(
                "endpoint",
                &failure,
                "unset K8E_SANDBOX_ENDPOINT, or correct --endpoint",
            ));
            return checks;
        }
    };
    let found = block_on_to_the_end(async {
        checks.extend(check_server(globals, is_local).await);
        Ok(0)
    });
    if let Err(failure) = found {
        checks.push(Check::failed(
            "connection",
            &failure,
            "raise the limits of this process (ulimit)",
        ));
    }
    checks.extend(check_skills(whole));
    checks
}

/// Prints the checks; returns the exit code.
pub fn report(checks: &[Check], args: &DoctorArgs) -> ExitCode {
    let problems = checks.iter().filter(|check| !check.ok).count();
    let code = u8::from(problems > 0);
    let printed = match args.json {
        true => output::json(&ReportJson {
            ok: problems == 0,
            problems,
            checks,
        }),
        false => output::text(text(checks, problems).as_bytes()),
    };
    match printed {
        Ok(()) => ExitCode::from(code),
        Err(failure) => output::failure(&failure, args.json),
    }
}

fn text(checks: &[Check], problems: usize) -> String {
    let mut text = String::new();
    for check in checks {
        let verdict = if check.ok { "ok" } else { "problem" };
        let _ = writeln!(text, "{verdict:<8} {:<18} {}", check.name, check.detail);
        if !check.fix.is_empty() {
            let _ = writeln!(text, "{:>27} {}", "→", check.fix);
        }
    }
    let _ = match problems {
        0 => writeln!(text, "\nno problem was found"),
        1 => writeln!(text, "\n1 problem: do what its → says"),
        count => writeln!(
            text,
            "\n{count} problems: do what their → say, from the first to the last"
        ),
    };
    text
}

async fn check_server(globals: &Globals, is_local: bool) -> Vec<Check> {
    let without_start = Globals {
        no_autostart: true,
        ..globals.clone()
    };
    let mut client = match connect::connect(&without_start).await {
        Ok(client) => client,
        Err(failure) => {
            // A client that is root starts one: that is how it begins.
            if is_local && connect::would_start(globals) {
                let detail = "no server runs yet; the first `k8e sandbox` command starts one";
                return vec![Check::ok("connection", detail)];
            }
            let fix = match (is_local, connect::is_denied(globals)) {
                (true, true) => {
                    "use sudo, or join the group (`sudo usermod -aG k8e $USER`) and log in again"
                }
                (true, false) => "start a server: `sudo k8e server`; or name one with --endpoint",
                (false, _) => {
                    "check the address (--endpoint), that `k8e server --listen` serves it, and certificate and API key \
                     (`k8e login --help`)"
                }
            };
            return vec![Check::failed("connection", &failure, fix)];
        }
    };
    let mut checks = vec![Check::ok("connection", "the server answers")];
    match tokio::time::timeout(ANSWER_WITHIN, status(&mut client)).await {
        Ok(Ok(status)) => checks.extend(check_status(&status)),
        Ok(Err(failure)) => {
            let fix = "`k8e apikey create NAME` on the server makes a key, `k8e login` gets a certificate for it";
            checks.push(Check::failed("calls", &failure, fix));
        }
        Err(_) => {
            let error = format!("no answer within {} s", ANSWER_WITHIN.as_secs());
            let failure = Failure::unreachable(error, "timeout");
            checks.push(Check::failed(
                "calls",
                &failure,
                "the server hangs: `sudo k8e server restart`",
            ));
        }
    }
    checks
}

async fn status(client: &mut Client) -> Result<v1::Status, Failure> {
    Ok(client
        .get_status(v1::GetStatusRequest {})
        .await?
        .into_inner())
}

fn check_status(status: &v1::Status) -> Vec<Check> {
    let own = env!("CARGO_PKG_VERSION");
    let mut checks = Vec::new();
    let version = format!("server {}, client {own}", status.version);
    checks.push(match status.version == own {
        true => Check::ok("version", version),
        false => Check::problem(
            "version",
            version,
            "install the same version on both sides; restart the server after an upgrade",
        ),
    });
    let usable: Vec<&str> = status
        .runtimes
        .iter()
        .filter(|runtime| runtime.usable)
        .map(|runtime| runtime.name.as_str())
        .collect();
    checks.push(match usable.is_empty() {
        false => Check::ok(
            "runtimes",
            format!(
                "usable: {}; default: {}",
                usable.join(", "),
                status.default_runtime
            ),
        ),
        true => {
            let reasons: Vec<String> = status
                .runtimes
                .iter()
                .map(|runtime| format!("{}: {}", runtime.name, runtime.reason))
                .collect();
            Check::problem(
                "runtimes",
                format!("none is usable ({})", reasons.join("; ")),
                "run `sudo k8e check-config` on the server",
            )
        }
    });
    let sessions = format!("{} of {}", status.sessions_active, status.sessions_max);
    checks.push(match status.sessions_active < status.sessions_max {
        true => Check::ok("sessions", sessions),
        false => Check::problem(
            "sessions",
            sessions,
            "`k8e sandbox prune` destroys idle ones; `k8e server --max-sessions` raises the limit",
        ),
    });
    checks
}

/// Installed skills that are of another version; none is no problem.
fn check_skills(whole: fn() -> clap::Command) -> Option<Check> {
    let stale = skill::stale(whole());
    match stale.as_slice() {
        [] => None,
        stale => Some(Check::problem(
            "skills",
            format!("of another version: {}", stale.join(", ")),
            &format!("`k8e skill install {}`", stale.join(" ")),
        )),
    }
}

// === impl Check ===

impl Check {
    /// Nothing to do.
    pub fn ok(name: &str, detail: impl Into<String>) -> Self {
        Self {
            name: name.to_owned(),
            ok: true,
            detail: detail.into(),
            fix: String::new(),
        }
    }

    /// Something to do.
    pub fn problem(name: &str, detail: impl Into<String>, fix: &str) -> Self {
        Self {
            ok: false,
            fix: fix.to_owned(),
            ..Self::ok(name, detail)
        }
    }

    fn failed(name: &str, failure: &Failure, fix: &str) -> Self {
        let detail = match failure {
            Failure::Told { error, detail, .. } => format!("{error} ({detail})"),
            Failure::BrokenPipe => "interrupted".to_owned(),
        };
        Self::problem(name, detail, fix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy() -> v1::Status {
        v1::Status {
            version: env!("CARGO_PKG_VERSION").into(),
            runtimes: vec![v1::Runtime {
                name: "native".into(),
                usable: true,
                reason: String::new(),
            }],
            default_runtime: "native".into(),
            sessions_max: 10,
            ..Default::default()
        }
    }

    #[test]
    fn a_server_that_cannot_work_is_named() {
        assert!(check_status(&healthy()).iter().all(|check| check.ok));
        let mut status = healthy();
        status.version = "0.0.1".into();
        status.runtimes[0].usable = false;
        status.runtimes[0].reason = "no cgroups".into();
        status.sessions_active = 10;
        let checks = check_status(&status);
        for (name, word) in [
            ("version", "same version"),
            ("runtimes", "check-config"),
            ("sessions", "prune"),
        ] {
            let check = checks.iter().find(|check| check.name == name).unwrap();
            assert!(!check.ok && check.fix.contains(word), "{check:?}");
        }
        assert!(checks[1].detail.contains("no cgroups"));
    }

    #[test]
    fn text_says_what_to_do() {
        let checks = [
            Check::ok("endpoint", "unix:///k8e.sock"),
            Check::problem("connection", "no server", "start one"),
        ];
        assert_eq!(
            text(&checks, 1),
            "ok       endpoint           unix:///k8e.sock\n\
             problem  connection         no server\n                          → start one\n\
             \n1 problem: do what its → says\n"
        );
    }
}
