//! Subcommands of `k8e sandbox`, and of `k8e` itself: one file for each.

mod allow_hosts;
mod allowing;
pub(crate) mod apikey;
mod approvals;
pub(crate) mod audit;
mod cp;
mod create;
mod destroy;
pub(crate) mod e2b;
mod egress;
mod ended;
mod events;
mod exec;
mod expose;
mod files;
mod fork;
mod get;
mod hosts;
mod list;
mod log;
pub(crate) mod login;
mod metrics;
mod pause;
mod pool;
mod prune;
mod ps;
mod read;
mod run;
mod runs;
pub(crate) mod secret;
mod sessions;
mod shell;
mod snapshot;
mod spec;
mod status;
mod stream;
mod subagent;
pub(crate) mod template;
mod watch;
mod write;

use crate::connect::connect;
use crate::failure::Failure;
use crate::{Globals, Late};
use clap::Subcommand;

/// First paragraphs of `k8e sandbox --help`.
pub(crate) const ABOUT: &str = "\
Run code and commands in sandboxes, and manage sessions.

`run` alone is enough: it creates a session the first time and reuses it the next time, so files and
installed packages persist.

  k8e sandbox run 'print(1 + 1)' --lang python
  k8e sandbox run 'make test' --raw --timeout 10m
  echo 'console.log(1)' | k8e sandbox run --lang node

With explicit sessions:

  SID=$(k8e sandbox create | jq -r .session_id)
  k8e sandbox write $SID data.csv < data.csv
  k8e sandbox run 'wc -l data.csv' --session-id $SID
  k8e sandbox destroy $SID

Every command prints one JSON object; `--raw` streams bytes. `run` and `exec` exit with the exit
code of the command. Otherwise 1 is a failed request and 2 an unreachable server; errors are
{\"error\":…,\"detail\":…} on standard output and a line on standard error.";

/// The commands of `k8e sandbox`.
#[derive(Subcommand, Debug)]
pub enum SandboxCommand {
    /// Run code, or a shell command, in a sandbox
    #[command(long_about = run::LONG_ABOUT)]
    Run(Late<run::RunArgs>),
    /// Show status and output of a background run
    #[command(long_about = runs::LONG_ABOUT)]
    Poll(Late<runs::PollArgs>),
    /// List the background runs of a session
    Runs(Late<runs::RunsArgs>),
    /// Cancel a background run
    Cancel(Late<runs::CancelArgs>),
    /// Open an interactive shell, or another program, in a terminal of a session
    #[command(long_about = shell::LONG_ABOUT)]
    Shell(Late<Box<shell::ShellArgs>>),
    /// Expose a service in a session at a URL
    #[command(long_about = expose::LONG_ABOUT)]
    Expose(Late<expose::ExposeArgs>),
    /// Stop exposing a service: its URL ends
    Unexpose(Late<expose::UnexposeArgs>),
    /// List the exposed services of a session
    Exposed(Late<expose::ExposedArgs>),
    /// Create a session
    #[command(long_about = create::LONG_ABOUT)]
    Create(Late<create::CreateArgs>),
    /// Show a session
    Get(Late<get::GetArgs>),
    /// List sessions, or watch them
    Sessions(Late<sessions::SessionsArgs>),
    /// Change the egress allow-list of a session
    #[command(long_about = allow_hosts::LONG_ABOUT)]
    AllowHosts(Late<allow_hosts::AllowHostsArgs>),
    /// Show the egress connections of a session, allowed and denied
    #[command(long_about = egress::LONG_ABOUT)]
    Egress(Late<egress::EgressArgs>),
    /// Request human approval for an action, and wait for it
    #[command(long_about = approvals::LONG_ABOUT)]
    Confirm(Late<approvals::ConfirmArgs>),
    /// Approve or reject a request of `confirm`
    Approve(Late<approvals::ApproveArgs>),
    /// List pending approval requests
    Approvals(Late<approvals::ApprovalsArgs>),
    /// Pause a session: stop all its processes until it is resumed
    #[command(long_about = pause::LONG_ABOUT)]
    Pause(Late<pause::PauseArgs>),
    /// Resume a paused session
    Resume(Late<pause::ResumeArgs>),
    /// Fork a session: make sessions that continue from the point at which it is
    #[command(long_about = fork::LONG_ABOUT)]
    Fork(Late<fork::ForkArgs>),
    /// Save the workspace of a session, and restore it
    #[command(subcommand, long_about = snapshot::LONG_ABOUT)]
    Snapshot(snapshot::SnapshotCommand),
    /// Create a sub-agent: a session that shares the sandbox of another
    #[command(long_about = subagent::LONG_ABOUT)]
    Subagent(Late<subagent::SubagentArgs>),
    /// Destroy a session and its sandbox
    Destroy(Late<destroy::DestroyArgs>),
    /// Destroy your sessions that have not been used for a while
    #[command(long_about = prune::LONG_ABOUT)]
    Prune(Late<prune::PruneArgs>),
    /// Show the state of the server: version, runtimes, default limits, number of sessions
    Status(Late<status::StatusArgs>),
    /// Show the warm pool
    #[command(long_about = pool::LONG_ABOUT)]
    Pool(Late<pool::PoolArgs>),
    /// Execute a program with arguments, without a shell
    #[command(long_about = exec::LONG_ABOUT)]
    Exec(Late<exec::ExecArgs>),
    /// Write standard input to a file in the workspace
    #[command(long_about = write::LONG_ABOUT)]
    Write(Late<write::WriteArgs>),
    /// Read a file of the workspace
    #[command(long_about = read::LONG_ABOUT)]
    Read(Late<read::ReadArgs>),
    /// Copy files and directories to a session, or out of it
    #[command(long_about = cp::LONG_ABOUT)]
    Cp(Late<cp::CpArgs>),
    /// List the files of the workspace
    List(Late<list::ListArgs>),
    /// Show metadata of a file in the workspace
    Stat(Late<files::StatArgs>),
    /// Create a directory in the workspace
    Mkdir(Late<files::MkdirArgs>),
    /// Move or rename a file of the workspace
    Mv(Late<files::MvArgs>),
    /// Remove a file or a directory of the workspace
    Rm(Late<files::RmArgs>),
    /// Watch a directory of the workspace for changes
    #[command(long_about = watch::LONG_ABOUT)]
    Watch(Late<watch::WatchArgs>),
    /// List the processes of a sandbox
    Ps(Late<ps::PsArgs>),
    /// Show what a session uses: CPU, memory and disk, and its limits
    Metrics(Late<metrics::MetricsArgs>),
    /// Show the transcript of a session: the output of its commands
    #[command(long_about = log::LONG_ABOUT)]
    Log(Late<log::LogArgs>),
    /// Show the event log of a session
    Events(Late<events::EventsArgs>),
}

// === impl SandboxCommand ===

impl SandboxCommand {
    /// Whether standard output is JSON; errors are printed as JSON then too.
    pub(crate) fn prints_json(&self) -> bool {
        match self {
            Self::Run(Late(args)) => !args.raw(),
            Self::Exec(Late(args)) => !args.raw(),
            Self::Read(Late(args)) => !args.raw(),
            Self::Poll(Late(args)) => !args.raw(),
            Self::Cp(Late(args)) => !args.to_stdout(),
            Self::Log(_) | Self::Shell(_) => false,
            Self::Sessions(Late(args)) => args.is_json(),
            Self::Runs(Late(args)) => args.is_json(),
            Self::List(Late(args)) => args.is_json(),
            Self::Ps(Late(args)) => args.is_json(),
            Self::Snapshot(command) => command.prints_json(),
            Self::Egress(Late(args)) => !args.for_people(),
            Self::Create(_)
            | Self::Cancel(_)
            | Self::Expose(_)
            | Self::Unexpose(_)
            | Self::Exposed(_)
            | Self::AllowHosts(_)
            | Self::Confirm(_)
            | Self::Approve(_)
            | Self::Approvals(_)
            | Self::Get(_)
            | Self::Pause(_)
            | Self::Fork(_)
            | Self::Resume(_)
            | Self::Subagent(_)
            | Self::Destroy(_)
            | Self::Prune(_)
            | Self::Status(_)
            | Self::Pool(_)
            | Self::Write(_)
            | Self::Stat(_)
            | Self::Mkdir(_)
            | Self::Mv(_)
            | Self::Rm(_)
            | Self::Watch(_)
            | Self::Metrics(_)
            | Self::Events(_) => true,
        }
    }
}

impl SandboxCommand {
    /// Whether the command handles signals itself.
    pub(crate) fn takes_signals(&self) -> bool {
        matches!(self, Self::Shell(_))
    }
}

pub(crate) async fn run(command: SandboxCommand, globals: &Globals) -> Result<u8, Failure> {
    let client = || connect(globals);
    match command {
        // Arguments are validated before a server is contacted, or started.
        SandboxCommand::Run(Late(args)) => {
            let background = args.background();
            let request = args.request().await?;
            let mut client = client().await?;
            if let Some(create) = &request.start.create {
                template::ensure(&mut client, &create.template).await?;
            }
            match background {
                true => run::start(request, client).await,
                false => stream::drive(client, request).await,
            }
        }
        SandboxCommand::Shell(Late(args)) => {
            let request = args.request()?;
            shell::run(request, client().await?).await
        }
        SandboxCommand::Poll(Late(args)) => runs::poll(args, client().await?).await,
        SandboxCommand::Runs(Late(args)) => runs::list(args, client().await?).await,
        SandboxCommand::Cancel(Late(args)) => runs::cancel(args, client().await?).await,
        SandboxCommand::Expose(Late(args)) => expose::expose(args, client().await?).await,
        SandboxCommand::Unexpose(Late(args)) => expose::unexpose(args, client().await?).await,
        SandboxCommand::Exposed(Late(args)) => expose::list(args, client().await?).await,
        SandboxCommand::Exec(Late(args)) => {
            let request = args.request()?;
            stream::drive(client().await?, request).await
        }
        SandboxCommand::Status(Late(args)) => status::run(args, client().await).await,
        SandboxCommand::Pool(Late(args)) => pool::run(args, client().await?).await,
        SandboxCommand::Create(Late(args)) => {
            let entrypoint = args.entrypoint();
            let request = args.request()?;
            create::run(request, entrypoint, client().await?).await
        }
        SandboxCommand::AllowHosts(Late(args)) => {
            let request = args.request()?;
            allow_hosts::run(request, client().await?).await
        }
        SandboxCommand::Egress(Late(args)) => egress::run(args, client().await?).await,
        SandboxCommand::Confirm(Late(args)) => {
            let request = args.request()?;
            approvals::confirm(request, client().await?).await
        }
        SandboxCommand::Approve(Late(args)) => approvals::approve(args, client().await?).await,
        SandboxCommand::Approvals(Late(args)) => approvals::list(args, client().await?).await,
        SandboxCommand::Get(Late(args)) => get::run(args, client().await?).await,
        SandboxCommand::Sessions(Late(args)) => sessions::run(args, client().await?).await,
        SandboxCommand::Pause(Late(args)) => pause::pause(args, client().await?).await,
        SandboxCommand::Resume(Late(args)) => pause::resume(args, client().await?).await,
        SandboxCommand::Fork(Late(args)) => fork::fork(args, client().await?).await,
        SandboxCommand::Snapshot(command) => {
            command.check()?;
            Box::pin(snapshot::run(command, client().await?)).await
        }
        SandboxCommand::Subagent(Late(args)) => subagent::run(args, client().await?).await,
        SandboxCommand::Prune(Late(args)) => {
            let request = args.request(globals)?;
            prune::run(request, client().await?).await
        }
        SandboxCommand::Destroy(Late(args)) => destroy::run(args, client().await?).await,
        SandboxCommand::Write(Late(args)) => write::run(args, client().await?).await,
        SandboxCommand::Read(Late(args)) => read::run(args, client().await?).await,
        SandboxCommand::Cp(Late(args)) => {
            let copy = args.request()?;
            cp::run(copy, client().await?).await
        }
        SandboxCommand::List(Late(args)) => list::run(args, client().await?).await,
        SandboxCommand::Stat(Late(args)) => files::stat(args, client().await?).await,
        SandboxCommand::Mkdir(Late(args)) => files::mkdir(args, client().await?).await,
        SandboxCommand::Mv(Late(args)) => files::mv(args, client().await?).await,
        SandboxCommand::Rm(Late(args)) => files::rm(args, client().await?).await,
        SandboxCommand::Watch(Late(args)) => watch::run(args, client().await?).await,
        SandboxCommand::Ps(Late(args)) => ps::run(args, client().await?).await,
        SandboxCommand::Metrics(Late(args)) => metrics::run(args, client().await?).await,
        SandboxCommand::Log(Late(args)) => log::run(args, client().await?).await,
        SandboxCommand::Events(Late(args)) => events::run(args, client().await?).await,
    }
}
