//! The client commands of k8e: what was typed becomes API calls, what comes back becomes JSON.
//!
//! The command line holds no state: sessions are found again by tenant on the server, so a killed
//! `k8e` leaves nothing to repair. Every command is one file in `commands/`: its arguments, its
//! calls and what it prints.

mod bench;
mod commands;
mod completion;
mod connect;
mod failure;
mod late;
mod output;
mod render;
mod tty;
pub mod units;
mod usage;

pub use completion::CompletionArgs;
pub use late::Late;

use clap::{Args, Parser, Subcommand};
use failure::{EXIT_INTERRUPTED, EXIT_REQUEST, Failure};
use k8e_model::ApiKey;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Flags that every command takes, before or after its name.
#[derive(Args, Clone, Debug)]
pub struct Globals {
    /// The server: unix:///path, host:port or https://host:port [default: the one on this machine]
    #[arg(
        long,
        global = true,
        env = "K8E_SANDBOX_ENDPOINT",
        value_name = "ADDRESS",
        help_heading = "Connection"
    )]
    pub endpoint: Option<String>,

    /// Where the server of this machine keeps its data and its socket
    #[arg(
        long,
        global = true,
        env = "K8E_DATA_DIR",
        default_value = "/var/lib/k8e",
        value_name = "DIR",
        help_heading = "Connection"
    )]
    pub data_dir: PathBuf,

    /// Where ca.crt, client.crt and client.key are, for TCP [default: ~/.k8e/sandbox]
    #[arg(
        long,
        global = true,
        env = "K8E_SANDBOX_CERT_DIR",
        value_name = "DIR",
        help_heading = "Connection"
    )]
    pub cert_dir: Option<PathBuf>,

    /// The authority that signed the server's certificate, for TCP [default: ca.crt in --cert-dir]
    #[arg(
        long,
        global = true,
        env = "K8E_SANDBOX_CERT",
        value_name = "FILE",
        help_heading = "Connection"
    )]
    pub ca_cert: Option<PathBuf>,

    /// Who you are, for a server on TCP: an API key that was made there
    #[arg(
        long,
        global = true,
        env = "K8E_SANDBOX_APIKEY",
        hide_env_values = true,
        value_name = "KEY",
        value_parser = KeyArg::parse,
        help_heading = "Connection"
    )]
    pub apikey: Option<KeyArg>,

    /// Do not start a server when none runs on this machine
    #[arg(
        long,
        global = true,
        env = "K8E_NO_AUTOSTART",
        value_parser = clap::builder::FalseyValueParser::new(),
        help_heading = "Connection"
    )]
    pub no_autostart: bool,
}

/// An API key as it was typed; an empty one is none, which is how people unset a variable.
#[derive(Clone, Debug)]
pub struct KeyArg(Option<ApiKey>);

/// The commands of a client.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run code and commands in sandboxes, and manage them
    #[command(subcommand, long_about = commands::ABOUT)]
    Sandbox(Box<commands::SandboxCommand>),

    /// Make, list and delete API keys
    #[command(subcommand, long_about = commands::apikey::LONG_ABOUT)]
    Apikey(commands::apikey::ApikeyCommand),

    /// Get a certificate for an API key
    #[command(long_about = commands::login::LONG_ABOUT)]
    Login(Late<commands::login::LoginArgs>),

    /// Set, list and delete secrets for commands in sandboxes
    #[command(subcommand, long_about = commands::secret::LONG_ABOUT)]
    Secret(commands::secret::SecretCommand),

    /// Show who changed what
    #[command(long_about = commands::audit::LONG_ABOUT)]
    Audit(Late<commands::audit::AuditArgs>),

    /// Measure this server next to what this machine and other tools need
    Bench(Late<bench::BenchArgs>),

    /// Print a completion script for your shell
    Completion(Late<CompletionArgs>),
}

/// Reads a command line. On failure everything is said and the exit code is what is left to do.
///
/// A wrong command line exits with 1: 2 is for a server that cannot be reached.
pub fn parse<P: Parser>(args: &[OsString]) -> Result<P, ExitCode> {
    P::try_parse_from(args).map_err(|mut error| {
        let usage = (error.use_stderr()).then(|| usage::describe(&mut error, args, &P::command()));
        // A closed terminal is no reason to panic, and there is nobody left to tell.
        let _ = error.print();
        let Some(usage) = usage else {
            return ExitCode::SUCCESS;
        };
        if wants_json(args) {
            output::error_json(&usage.error, &usage.detail, None);
        }
        ExitCode::from(EXIT_REQUEST)
    })
}

/// Does what a client command says. `whole` makes the complete command line, for completions.
pub fn run(globals: &Globals, command: Command, whole: fn() -> clap::Command) -> ExitCode {
    let json = match &command {
        Command::Sandbox(command) => command.prints_json(),
        Command::Apikey(_) | Command::Login(_) | Command::Secret(_) | Command::Audit(_) => true,
        Command::Bench(_) | Command::Completion(_) => false,
    };
    let result = match command {
        Command::Completion(Late(args)) => completion::run(args, whole()),
        // It has every signal go inside, or cleans up.
        Command::Sandbox(command) if command.takes_signals() => {
            block_on_to_the_end(commands::run(*command, globals))
        }
        Command::Sandbox(command) => block_on(commands::run(*command, globals)),
        Command::Apikey(command) => block_on(async {
            commands::apikey::run(command, connect::connect(globals).await?).await
        }),
        Command::Login(Late(args)) => block_on(commands::login::run(args, globals)),
        Command::Secret(command) => block_on(async {
            let request = command.request().await?;
            commands::secret::run(request, connect::connect(globals).await?).await
        }),
        Command::Audit(Late(args)) => {
            block_on(async { commands::audit::run(args, connect::connect(globals).await?).await })
        }
        // Interrupted, it still has to remove what it made.
        Command::Bench(Late(args)) => block_on_to_the_end(bench::run(args, globals)),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => output::failure(&failure, json),
    }
}

/// Prints what a command that needs no server has to say; the exit code is `code`, unless nobody
/// reads.
pub fn print(bytes: &[u8], code: u8) -> ExitCode {
    match output::text(bytes) {
        Ok(()) => ExitCode::from(code),
        Err(failure) => output::failure(&failure, false),
    }
}

/// Ctrl-C drops the call, and so ends what it started on the server.
fn block_on(work: impl Future<Output = Result<u8, Failure>>) -> Result<u8, Failure> {
    block_on_to_the_end(async {
        tokio::select! {
            result = work => result,
            _ = tokio::signal::ctrl_c() => Ok(EXIT_INTERRUPTED),
        }
    })
}

/// One thread: a client waits, it does not compute.
fn block_on_to_the_end(work: impl Future<Output = Result<u8, Failure>>) -> Result<u8, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::io("start the runtime", &e))?;
    let result = runtime.block_on(work);
    // Not waited for: a thread that reads standard input may never come back.
    runtime.shutdown_background();
    result
}

fn wants_json(args: &[OsString]) -> bool {
    let has = |word: &str| args.iter().any(|arg| arg == word);
    let ours = ["sandbox", "apikey", "login", "secret", "audit"];
    ours.into_iter().any(has) && !has("--raw")
}

// === impl KeyArg ===

impl KeyArg {
    /// What is wrong is not repeated: it may be nearly right.
    fn parse(text: &str) -> Result<Self, k8e_model::Error> {
        if text.is_empty() {
            return Ok(Self(None));
        }
        ApiKey::parse(text).map(Some).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[derive(Parser)]
    #[command(name = "k8e")]
    struct Whole {
        #[command(flatten)]
        globals: Globals,
        #[command(subcommand)]
        command: Command,
    }

    fn parsed(line: &str) -> Result<Whole, clap::Error> {
        Whole::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Whole::command().debug_assert();
    }

    #[test]
    fn global_flags_work_anywhere() {
        for line in [
            "k8e --endpoint a:1 --no-autostart sandbox get s",
            "k8e sandbox --endpoint a:1 get s --no-autostart",
            "k8e sandbox get s --no-autostart --endpoint a:1",
        ] {
            let whole = parsed(line).unwrap();
            assert_eq!(whole.globals.endpoint.as_deref(), Some("a:1"), "{line}");
            assert!(whole.globals.no_autostart, "{line}");
        }
    }

    #[test]
    fn command_lines_are_read() {
        for good in [
            "k8e sandbox run true --lang py --timeout 2.5 --tenant t --raw",
            "k8e sandbox run - --fresh --memory 512MiB --cpus 1.5 --pids 64 --disk 4GiB",
            "k8e sandbox run x --env A=b --env C=d --workdir /tmp --user nobody --stdin",
            "k8e sandbox create --ttl 2h --idle-timeout never --label a=b --runtime native",
            "k8e sandbox exec s -- ls -la --raw",
            "k8e sandbox exec s --raw ls -la",
            "k8e sandbox write s f --mode a --perm 0755",
            "k8e sandbox list s --since 5 --recursive=false sub",
            "k8e sandbox log s --follow --offset 1 --limit 2",
            "k8e sandbox events s --limit 5",
            "k8e sandbox run x --allowed-hosts a.example,*.b.example --allowed-hosts @python",
            "k8e sandbox create --allowed-hosts none",
            "k8e sandbox allow-hosts a.example,b.example --session-id s",
            "k8e sandbox allow-hosts --add a.example --remove b.example,c.example",
            "k8e sandbox allow-hosts --clear",
            "k8e sandbox egress s --denied --follow",
            "k8e sandbox pool",
            "k8e sandbox confirm s rm --timeout 10m",
            "k8e sandbox confirm s rm --no-wait",
            "k8e sandbox confirm --approval-id approval-a",
            "k8e sandbox approve approval-a --reject --reason no",
            "k8e sandbox approvals --session-id s --all",
            "k8e sandbox run --background true --timeout 1h",
            "k8e sandbox poll run-a --follow",
            "k8e sandbox poll run-a --wait",
            "k8e sandbox runs s",
            "k8e sandbox cancel run-a",
            "k8e sandbox shell",
            "k8e sandbox shell s -- python3 -q",
            "k8e sandbox shell --tenant t -- top",
            "k8e sandbox shell --attach term-a",
            "k8e sandbox create --secret A=github:token --secret B=github",
            "k8e apikey create ann --expires 30d --principal ann@example.com",
            "k8e apikey create ann --ttl never",
            "k8e apikey list",
            "k8e apikey delete key-abc",
            "k8e apikey revoke-certificate 00:aa",
            "k8e secret set github:token --exact",
            "k8e secret list",
            "k8e secret delete github --principal ann",
            "k8e audit --limit 5 --since 1h --principal ann",
            "k8e login --device-name x",
            "k8e completion zsh",
            "k8e bench --iterations 5 --json",
            "k8e bench --only latency --only density --runtime native --live 1,10 --live-gvisor 2 --svg f",
            "k8e bench --clients 4 --seconds 2",
        ] {
            assert!(
                parsed(good).is_ok(),
                "{good}: {}",
                parsed(good).err().unwrap()
            );
        }
        for bad in [
            "k8e sandbox run x --lang cobol",
            "k8e sandbox run x --timeout soon",
            "k8e sandbox exec s",
            "k8e sandbox write s f --mode x",
            "k8e sandbox get",
            "k8e sandbox egress",
            "k8e sandbox confirm s",
            "k8e sandbox confirm s rm --approval-id approval-a",
            "k8e sandbox confirm --approval-id approval-a --timeout 1s",
            "k8e sandbox approve",
            "k8e sandbox run x --background --raw",
            "k8e sandbox run x --background --fresh",
            "k8e sandbox poll",
            "k8e sandbox shell s python3",
            "k8e sandbox shell --attach term-a -- top",
            "k8e sandbox poll run-a --wait --follow",
            "k8e sandbox dance",
            "k8e sandbox create --secret A",
            "k8e sandbox get s --apikey 00",
            "k8e apikey create",
            "k8e secret",
            "k8e bench --only speed",
            "k8e bench --live 0",
            "k8e bench --runtime docker",
        ] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_command_line_is_said_in_one_line() {
        for (line, error, detail) in [
            (
                "k8e sandbox get",
                "missing argument <SESSION>",
                "usage: k8e sandbox get [OPTIONS] <SESSION>; see `k8e sandbox get --help`",
            ),
            (
                "k8e sandbox write",
                "missing arguments <SESSION>, <PATH>",
                "usage: k8e sandbox write [OPTIONS] <SESSION> <PATH>; see `k8e sandbox write --help`",
            ),
            (
                "k8e sandbox rnu 1",
                "unknown command \"rnu\": the nearest command is `k8e sandbox run`",
                "usage: k8e sandbox [OPTIONS] <COMMAND>; see `k8e sandbox --help`",
            ),
            (
                "k8e sandbox --no-autostart ls",
                "unknown command \"ls\": the nearest command is `k8e sandbox sessions`",
                "usage: k8e sandbox [OPTIONS] <COMMAND>; see `k8e sandbox --help`",
            ),
            (
                "k8e run 1",
                "unknown command \"run\": the nearest command is `k8e sandbox run`",
                "usage: k8e [OPTIONS] <COMMAND>; see `k8e --help`",
            ),
            (
                "k8e secret",
                "missing command after `k8e secret`",
                "usage: k8e secret [OPTIONS] <COMMAND>; see `k8e secret --help`",
            ),
            (
                "k8e sandbox run x --tiemout 3",
                "unexpected argument '--tiemout' found: the nearest flag is --timeout",
                "usage: k8e sandbox run [OPTIONS] [CODE]; see `k8e sandbox run --help`",
            ),
        ] {
            let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let mut wrong = Whole::try_parse_from(&args).err().unwrap();
            let said = usage::describe(&mut wrong, &args, &Whole::command());
            let want = usage::Usage {
                error: error.to_owned(),
                detail: detail.to_owned(),
            };
            assert_eq!(said, want, "{line}");
        }
        let args: Vec<OsString> = ["k8e", "sandbox", "rnu"].map(OsString::from).to_vec();
        let mut wrong = Whole::try_parse_from(&args).err().unwrap();
        usage::describe(&mut wrong, &args, &Whole::command());
        assert!(wrong.to_string().contains("'k8e sandbox run'"), "{wrong}");
    }

    #[test]
    fn a_key_is_not_printed() {
        let digits = "0a".repeat(32);
        let line = format!("k8e sandbox get s --apikey k8e_{digits}");
        let whole = parsed(&line).unwrap();
        assert!(!format!("{:?}", whole.globals).contains(&digits));
        let wrong = parsed("k8e sandbox get s --apikey k8e_nearly")
            .err()
            .unwrap();
        assert!(wrong.to_string().contains("no API key"));
    }

    #[test]
    fn json_is_wanted_unless_raw() {
        let args = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert!(wants_json(&args("k8e sandbox run")));
        assert!(!wants_json(&args("k8e sandbox run --raw")));
        assert!(!wants_json(&args("k8e server --nonsense")));
    }
}
