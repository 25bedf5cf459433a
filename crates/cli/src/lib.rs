//! The command-line client of k8e: arguments become gRPC calls, responses become JSON.
//!
//! It keeps no state on disk: the server finds the session of a `run`, so a killed `k8e` leaves nothing to repair. Each
//! command is one file in `commands/`: its arguments, its calls and its output.

mod bench;
mod catalog;
mod commands;
mod completion;
mod connect;
pub mod doctor;
mod failure;
mod late;
mod output;
mod render;
mod skill;
mod table;
mod tty;
pub mod units;
mod usage;

pub use completion::CompletionArgs;
#[cfg(target_os = "linux")]
pub use connect::start_server;
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
    /// Address of the server: unix:///path, host:port or https://host:port [default: k8e.sock in --data-dir]
    #[arg(
        long,
        global = true,
        env = "K8E_SANDBOX_ENDPOINT",
        value_name = "ADDRESS",
        help_heading = "Connection"
    )]
    pub endpoint: Option<String>,

    /// Data directory of the server on this machine, with its socket; change it to run several servers
    #[arg(
        long,
        global = true,
        env = "K8E_DATA_DIR",
        default_value = "/var/lib/k8e",
        value_name = "DIR",
        help_heading = "Connection"
    )]
    pub data_dir: PathBuf,

    /// Directory of ca.crt, client.crt and client.key, for servers on TCP [default: ~/.k8e/sandbox]
    #[arg(
        long,
        global = true,
        env = "K8E_SANDBOX_CERT_DIR",
        value_name = "DIR",
        help_heading = "Connection"
    )]
    pub cert_dir: Option<PathBuf>,

    /// CA certificate (PEM) that the server's certificate is verified with, for servers on TCP [default: ca.crt in --cert-dir]
    #[arg(
        long,
        global = true,
        env = "K8E_SANDBOX_CERT",
        value_name = "FILE",
        help_heading = "Connection"
    )]
    pub ca_cert: Option<PathBuf>,

    /// API key, for servers on TCP; `k8e apikey create` makes one on the server
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

    /// Do not auto-start a server when none runs on this machine
    #[arg(
        long,
        global = true,
        env = "K8E_NO_AUTOSTART",
        value_parser = clap::builder::FalseyValueParser::new(),
        help_heading = "Connection"
    )]
    pub no_autostart: bool,
}

/// Value of --apikey; empty counts as unset, as environment variables do.
#[derive(Clone, Debug)]
pub struct KeyArg(Option<ApiKey>);

/// The commands of a client.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run code and commands in sandboxes, and manage sessions
    #[command(subcommand, long_about = commands::ABOUT)]
    Sandbox(Box<commands::SandboxCommand>),

    /// Create, list and delete API keys
    #[command(subcommand, long_about = commands::apikey::LONG_ABOUT)]
    Apikey(commands::apikey::ApikeyCommand),

    /// Get a client certificate for an API key
    #[command(long_about = commands::login::LONG_ABOUT)]
    Login(Late<commands::login::LoginArgs>),

    /// Set, list and delete secrets (environment variables for commands in sandboxes)
    #[command(subcommand, long_about = commands::secret::LONG_ABOUT)]
    Secret(commands::secret::SecretCommand),

    /// Create, list and delete templates: images that sessions can have as their root file system
    #[command(subcommand, long_about = commands::template::LONG_ABOUT)]
    Template(commands::template::TemplateCommand),

    /// Print what E2B's clients need to use this server
    #[command(subcommand, long_about = commands::e2b::LONG_ABOUT)]
    E2b(commands::e2b::E2bCommand),

    /// Show the audit log: which principal changed what
    #[command(long_about = commands::audit::LONG_ABOUT)]
    Audit(Late<commands::audit::AuditArgs>),

    /// Benchmark this server: latency, throughput and density, compared with other tools on this machine
    Bench(Late<bench::BenchArgs>),

    /// Print the command tree as JSON, for agents
    #[command(long_about = catalog::LONG_ABOUT)]
    Catalog(Late<catalog::CatalogArgs>),

    /// Install a skill for coding agents, which tells them how to use k8e
    #[command(subcommand, long_about = skill::LONG_ABOUT)]
    Skill(skill::SkillCommand),

    /// Install a skill for coding agents; the same as `k8e skill install`
    SandboxInstallSkill(Late<skill::InstallArgs>),

    /// Print a completion script for your shell
    Completion(Late<CompletionArgs>),
}

/// Parses the command line; on failure prints the error and returns the exit code.
///
/// A usage error exits with 1: 2 is for a server that cannot be reached.
pub fn parse<P: Parser>(args: &[OsString]) -> Result<P, ExitCode> {
    P::try_parse_from(args).map_err(|mut error| {
        let usage = (error.use_stderr()).then(|| usage::describe(&mut error, args, &P::command()));
        // Fails when the terminal is closed; then there is nowhere to report it.
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

/// Executes a client command. `whole` builds the complete clap command, for completions and the catalog.
pub fn run(globals: &Globals, command: Command, whole: fn() -> clap::Command) -> ExitCode {
    let json = match &command {
        Command::Sandbox(command) => command.prints_json(),
        Command::Apikey(_)
        | Command::Login(_)
        | Command::Secret(_)
        | Command::Audit(_)
        | Command::SandboxInstallSkill(_)
        | Command::Catalog(_) => true,
        Command::Template(command) => command.prints_json(),
        Command::E2b(command) => command.prints_json(),
        Command::Skill(command) => command.prints_json(),
        Command::Bench(_) | Command::Completion(_) => false,
    };
    let result = match command {
        Command::Completion(Late(args)) => completion::run(args, whole()),
        Command::Catalog(Late(args)) => catalog::run(&args, whole()),
        Command::Skill(command) => skill::run(command, whole()),
        Command::SandboxInstallSkill(Late(args)) => skill::install(&args, whole()),
        // It forwards signals into the sandbox, or cleans up on them.
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
        Command::Template(command) => block_on(async {
            let request = command.request()?;
            commands::template::run(request, connect::connect(globals).await?).await
        }),
        Command::E2b(command) => block_on(commands::e2b::run(command, globals)),
        Command::Audit(Late(args)) => {
            block_on(async { commands::audit::run(args, connect::connect(globals).await?).await })
        }
        // Interrupted, it still has to remove its sessions.
        Command::Bench(Late(args)) => block_on_to_the_end(bench::run(args, globals)),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => output::failure(&failure, json),
    }
}

/// Prints the output of a command that needs no server and returns `code`, or the exit code of a failed write.
pub fn print(bytes: &[u8], code: u8) -> ExitCode {
    match output::text(bytes) {
        Ok(()) => ExitCode::from(code),
        Err(failure) => output::failure(&failure, false),
    }
}

/// Reports the failure of a command that prints JSON and needs no server; returns its exit code.
pub fn fail(error: &str, detail: &str) -> ExitCode {
    output::failure(&Failure::request(error, detail), true)
}

/// Runs a command; Ctrl-C cancels its call, and so ends what the call started on the server.
fn block_on(work: impl Future<Output = Result<u8, Failure>>) -> Result<u8, Failure> {
    block_on_to_the_end(async {
        tokio::select! {
            result = work => result,
            _ = tokio::signal::ctrl_c() => Ok(EXIT_INTERRUPTED),
        }
    })
}

/// Runs a command to its end, on one thread: a client mostly waits.
fn block_on_to_the_end(work: impl Future<Output = Result<u8, Failure>>) -> Result<u8, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::io("start the runtime", &e))?;
    let result = runtime.block_on(work);
    // Not waited for: a thread that is blocked reading standard input may never return.
    runtime.shutdown_background();
    result
}

fn wants_json(args: &[OsString]) -> bool {
    let has = |word: &str| args.iter().any(|arg| arg == word);
    let ours = [
        "sandbox",
        "apikey",
        "login",
        "secret",
        "template",
        "audit",
        "catalog",
        "skill",
        "sandbox-install-skill",
    ];
    ours.into_iter().any(has) && !has("--raw")
}

// === impl KeyArg ===

impl KeyArg {
    /// Errors do not contain the text: it may be almost a valid key.
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

    pub(crate) fn whole() -> clap::Command {
        Whole::command()
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
            "k8e sandbox watch s . --recursive",
            "k8e sandbox metrics s",
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
            "k8e template create py --from python:3.12",
            "k8e template list",
            "k8e template show py",
            "k8e template delete py",
            "k8e sandbox create --template py --entrypoint",
            "k8e audit --limit 5 --since 1h --principal ann",
            "k8e login --device-name x",
            "k8e completion zsh",
            "k8e catalog",
            "k8e catalog sandbox run",
            "k8e skill install",
            "k8e skill install claude codex --project",
            "k8e skill install all --project=/srv/app --force",
            "k8e skill uninstall pi",
            "k8e skill print",
            "k8e sandbox-install-skill all",
            "k8e sandbox cp a s:b",
            "k8e sandbox sessions --watch",
            "k8e sandbox sessions -o wide",
            "k8e sandbox list s --json",
            "k8e sandbox snapshot list -o name",
            "k8e template list -o table",
            "k8e sandbox prune --idle 30m --dry-run",
            "k8e e2b env --new-key me",
            "k8e sandbox cp s:b - --max-size 1GiB",
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
            "k8e sandbox watch s",
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
            "k8e template create py",
            "k8e sandbox run x --entrypoint",
            "k8e bench --only speed",
            "k8e skill install vim",
            "k8e sandbox ps s -o yaml",
            "k8e sandbox ps s -o table --json",
            "k8e e2b env --key short",
            "k8e e2b env --new-key a --key 00",
            "k8e sandbox cp a",
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
