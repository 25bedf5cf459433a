//! `k8e sandbox …`, and the commands beside it: one file for each.

mod allow_hosts;
pub(crate) mod apikey;
mod approvals;
pub(crate) mod audit;
mod create;
mod destroy;
mod egress;
mod events;
mod exec;
mod expose;
mod files;
mod get;
mod hosts;
mod list;
mod log;
pub(crate) mod login;
mod pause;
mod pool;
mod ps;
mod read;
mod run;
mod runs;
pub(crate) mod secret;
mod sessions;
mod shell;
mod spec;
mod status;
mod stream;
mod subagent;
mod write;

use crate::Globals;
use crate::connect::connect;
use crate::failure::Failure;
use clap::Subcommand;

/// What `k8e sandbox --help` begins with.
pub(crate) const ABOUT: &str = "\
Run code and commands in sandboxes, and manage them.

The short way is one command: `run` makes a session for its tenant when there is none, and uses it
again the next time, so files and installed packages stay.

  k8e sandbox run 'print(1 + 1)' --lang python
  k8e sandbox run 'make test' --raw --timeout 10m
  echo 'console.log(1)' | k8e sandbox run --lang node

The long way keeps sessions apart:

  SID=$(k8e sandbox create | jq -r .session_id)
  k8e sandbox write $SID data.csv < data.csv
  k8e sandbox run 'wc -l data.csv' --session-id $SID
  k8e sandbox destroy $SID

Every command prints one JSON object; `--raw` prints bytes as they come. `run` and `exec` exit with
the command's own code. Otherwise 1 is a failed request and 2 a server that cannot be reached;
errors are {\"error\":…,\"detail\":…} on standard output and a line on standard error.";

/// The commands of `k8e sandbox`.
#[derive(Subcommand, Debug)]
pub enum SandboxCommand {
    /// Run code, or a shell command, in a sandbox
    #[command(long_about = run::LONG_ABOUT)]
    Run(run::RunArgs),
    /// Show how a background run is doing
    #[command(long_about = runs::LONG_ABOUT)]
    Poll(runs::PollArgs),
    /// List the background runs of a session
    Runs(runs::RunsArgs),
    /// End a background run
    Cancel(runs::CancelArgs),
    /// Open a shell, or any program, at a terminal in a session
    #[command(long_about = shell::LONG_ABOUT)]
    Shell(Box<shell::ShellArgs>),
    /// Give a service in a session a URL
    #[command(long_about = expose::LONG_ABOUT)]
    Expose(expose::ExposeArgs),
    /// Take a service's URL back
    Unexpose(expose::UnexposeArgs),
    /// List the services of a session that have a URL
    Exposed(expose::ExposedArgs),
    /// Make a session
    #[command(long_about = create::LONG_ABOUT)]
    Create(create::CreateArgs),
    /// Show a session
    Get(get::GetArgs),
    /// List sessions
    Sessions(sessions::SessionsArgs),
    /// Change what a session may reach
    #[command(long_about = allow_hosts::LONG_ABOUT)]
    AllowHosts(allow_hosts::AllowHostsArgs),
    /// Show what a session tried to reach, and what was denied
    #[command(long_about = egress::LONG_ABOUT)]
    Egress(egress::EgressArgs),
    /// Ask a person before something that cannot be undone
    #[command(long_about = approvals::LONG_ABOUT)]
    Confirm(approvals::ConfirmArgs),
    /// Answer a question of `confirm`
    Approve(approvals::ApproveArgs),
    /// List the questions that wait for an answer
    Approvals(approvals::ApprovalsArgs),
    /// Stop everything in a session until it is resumed
    #[command(long_about = pause::LONG_ABOUT)]
    Pause(pause::PauseArgs),
    /// Let a paused session go on
    Resume(pause::ResumeArgs),
    /// Make a session that lives in the sandbox of another
    #[command(long_about = subagent::LONG_ABOUT)]
    Subagent(subagent::SubagentArgs),
    /// End a session and remove its sandbox
    Destroy(destroy::DestroyArgs),
    /// Show the server: version, runtimes, limits, load
    Status(status::StatusArgs),
    /// Show the sandboxes that wait for a session
    #[command(long_about = pool::LONG_ABOUT)]
    Pool(pool::PoolArgs),
    /// Execute a program with its arguments, without a shell
    #[command(long_about = exec::LONG_ABOUT)]
    Exec(exec::ExecArgs),
    /// Write standard input to a file in the workspace
    #[command(long_about = write::LONG_ABOUT)]
    Write(write::WriteArgs),
    /// Read a file of the workspace
    #[command(long_about = read::LONG_ABOUT)]
    Read(read::ReadArgs),
    /// List the files of the workspace
    List(list::ListArgs),
    /// Show one file of the workspace without its content
    Stat(files::StatArgs),
    /// Make a directory in the workspace
    Mkdir(files::MkdirArgs),
    /// Move or rename a file of the workspace
    Mv(files::MvArgs),
    /// Remove a file or a directory of the workspace
    Rm(files::RmArgs),
    /// List the processes of a sandbox
    Ps(ps::PsArgs),
    /// Show what a session's commands printed
    #[command(long_about = log::LONG_ABOUT)]
    Log(log::LogArgs),
    /// Show what happened to a session
    Events(events::EventsArgs),
}

// === impl SandboxCommand ===

impl SandboxCommand {
    /// Whether standard output is JSON, and so errors are too.
    pub(crate) fn prints_json(&self) -> bool {
        match self {
            Self::Run(args) => !args.raw(),
            Self::Exec(args) => !args.raw(),
            Self::Read(args) => !args.raw(),
            Self::Poll(args) => !args.raw(),
            Self::Log(_) | Self::Shell(_) => false,
            Self::Egress(args) => !args.for_people(),
            Self::Create(_)
            | Self::Runs(_)
            | Self::Cancel(_)
            | Self::Expose(_)
            | Self::Unexpose(_)
            | Self::Exposed(_)
            | Self::AllowHosts(_)
            | Self::Confirm(_)
            | Self::Approve(_)
            | Self::Approvals(_)
            | Self::Get(_)
            | Self::Sessions(_)
            | Self::Pause(_)
            | Self::Resume(_)
            | Self::Subagent(_)
            | Self::Destroy(_)
            | Self::Status(_)
            | Self::Pool(_)
            | Self::Write(_)
            | Self::List(_)
            | Self::Stat(_)
            | Self::Mkdir(_)
            | Self::Mv(_)
            | Self::Rm(_)
            | Self::Ps(_)
            | Self::Events(_) => true,
        }
    }
}

impl SandboxCommand {
    /// Whether it does something about signals itself.
    pub(crate) fn takes_signals(&self) -> bool {
        matches!(self, Self::Shell(_))
    }
}

pub(crate) async fn run(command: SandboxCommand, globals: &Globals) -> Result<u8, Failure> {
    let client = || connect(globals);
    match command {
        // What can be refused without a server is: the request is made, and checked, first.
        SandboxCommand::Run(args) => {
            let background = args.background();
            let request = args.request().await?;
            match background {
                true => run::start(request, client().await?).await,
                false => run::run(request, client().await?).await,
            }
        }
        SandboxCommand::Shell(args) => {
            let request = args.request()?;
            shell::run(request, client().await?).await
        }
        SandboxCommand::Poll(args) => runs::poll(args, client().await?).await,
        SandboxCommand::Runs(args) => runs::list(args, client().await?).await,
        SandboxCommand::Cancel(args) => runs::cancel(args, client().await?).await,
        SandboxCommand::Expose(args) => expose::expose(args, client().await?).await,
        SandboxCommand::Unexpose(args) => expose::unexpose(args, client().await?).await,
        SandboxCommand::Exposed(args) => expose::list(args, client().await?).await,
        SandboxCommand::Exec(args) => {
            let request = args.request()?;
            exec::run(request, client().await?).await
        }
        SandboxCommand::Status(args) => status::run(args, client().await).await,
        SandboxCommand::Pool(args) => pool::run(args, client().await?).await,
        SandboxCommand::Create(args) => {
            let request = args.request()?;
            create::run(request, client().await?).await
        }
        SandboxCommand::AllowHosts(args) => {
            let request = args.request()?;
            allow_hosts::run(request, client().await?).await
        }
        SandboxCommand::Egress(args) => egress::run(args, client().await?).await,
        SandboxCommand::Confirm(args) => {
            let request = args.request()?;
            approvals::confirm(request, client().await?).await
        }
        SandboxCommand::Approve(args) => approvals::approve(args, client().await?).await,
        SandboxCommand::Approvals(args) => approvals::list(args, client().await?).await,
        SandboxCommand::Get(args) => get::run(args, client().await?).await,
        SandboxCommand::Sessions(args) => sessions::run(args, client().await?).await,
        SandboxCommand::Pause(args) => pause::pause(args, client().await?).await,
        SandboxCommand::Resume(args) => pause::resume(args, client().await?).await,
        SandboxCommand::Subagent(args) => subagent::run(args, client().await?).await,
        SandboxCommand::Destroy(args) => destroy::run(args, client().await?).await,
        SandboxCommand::Write(args) => write::run(args, client().await?).await,
        SandboxCommand::Read(args) => read::run(args, client().await?).await,
        SandboxCommand::List(args) => list::run(args, client().await?).await,
        SandboxCommand::Stat(args) => files::stat(args, client().await?).await,
        SandboxCommand::Mkdir(args) => files::mkdir(args, client().await?).await,
        SandboxCommand::Mv(args) => files::mv(args, client().await?).await,
        SandboxCommand::Rm(args) => files::rm(args, client().await?).await,
        SandboxCommand::Ps(args) => ps::run(args, client().await?).await,
        SandboxCommand::Log(args) => log::run(args, client().await?).await,
        SandboxCommand::Events(args) => events::run(args, client().await?).await,
    }
}
