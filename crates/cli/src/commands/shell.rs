//! `k8e sandbox shell`: a shell, or any program, at a terminal in a session.

use super::spec::SpecArgs;
use super::stream::exit_code;
use crate::failure::{EXIT_REQUEST, Failure};
use crate::output::{self, Raw};
use crate::tty::{self, RawMode, Signals};
use crate::units;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1::{self, terminal_event::Event};
use std::ffi::OsString;
use std::time::Duration;
use tokio::io::AsyncReadExt as _;

/// Typed at once: a pasted page.
const INPUT_BYTES: usize = 64 * 1024;

/// How long we wait for the server when somebody ends us.
const GOODBYE_WITHIN: Duration = Duration::from_secs(3);

/// What `k8e sandbox shell --help` begins with.
pub(super) const LONG_ABOUT: &str = "\
Open a shell, or any program, at a terminal in a session. Every key goes inside, also Ctrl-C; the
exit code is the program's own.

The terminal outlives this command when the connection is lost: attach to it again with --attach.";

/// Arguments of `k8e sandbox shell`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox shell
  k8e sandbox shell $SID
  k8e sandbox shell $SID -- python3 -q
  k8e sandbox shell --attach term-…")]
pub struct ShellArgs {
    /// The session [default: the tenant's, which is made when there is none]
    #[arg(value_name = "SESSION", env = "K8E_SANDBOX_SESSION_ID")]
    session_id: Option<String>,

    /// Attach to this terminal instead of making one
    #[arg(long, value_name = "TERMINAL", conflicts_with_all = ["argv", "env", "workdir", "user"])]
    attach: Option<String>,

    /// A variable of its environment; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = units::pair)]
    env: Vec<(String, String)>,

    /// Its working directory [default: /workspace]
    #[arg(long, value_name = "DIR")]
    workdir: Option<String>,

    /// The user it runs as, inside [default: root]
    #[arg(long, value_name = "USER")]
    user: Option<String>,

    #[command(flatten)]
    spec: SpecArgs,

    /// The program and its arguments [default: bash]
    #[arg(last = true, value_name = "COMMAND")]
    argv: Vec<OsString>,
}

/// What to do: checked, not sent yet.
pub(crate) enum Request {
    Create(Box<v1::CreateTerminalRequest>),
    Attach(String),
}

/// How reading a terminal ended.
enum End {
    Exited(v1::TerminalExited),
    /// Somebody ends us.
    Signal(i32),
}

// === impl ShellArgs ===

impl ShellArgs {
    /// Refuses politely where nobody sits at a terminal.
    pub(crate) fn request(self) -> Result<Request, Failure> {
        if !tty::is_interactive() {
            return Err(Failure::request(
                "a shell needs a terminal on standard input and output: use `k8e sandbox run`, or `k8e sandbox exec --stdin --raw` in a pipe",
                "invalid",
            ));
        }
        if let Some(terminal_id) = self.attach {
            return Ok(Request::Attach(terminal_id));
        }
        let (rows, cols) = tty::size();
        Ok(Request::Create(Box::new(v1::CreateTerminalRequest {
            session_id: self.session_id.unwrap_or_default(),
            create: Some(self.spec.request()?),
            argv: self
                .argv
                .into_iter()
                .map(|arg| arg.into_encoded_bytes().into())
                .collect(),
            cwd: self.workdir.unwrap_or_default(),
            env: self.env.into_iter().collect(),
            user: self.user.unwrap_or_default(),
            rows,
            cols,
        })))
    }
}

pub(crate) async fn run(request: Request, mut client: Client) -> Result<u8, Failure> {
    let (terminal_id, attached) = match request {
        Request::Create(request) => {
            let terminal = client.create_terminal(*request).await?.into_inner();
            (terminal.terminal_id, false)
        }
        Request::Attach(terminal_id) => (terminal_id, true),
    };
    // Not before: until there is a terminal, Ctrl-C ends us as it ends any command.
    let mut signals = Signals::new().map_err(|e| Failure::io("wait for signals", &e))?;
    let end = {
        let _raw = RawMode::enter()?;
        if attached {
            resize(&mut client, &terminal_id).await?;
        }
        drive(&mut client, &mut signals, &terminal_id).await
    };
    match end {
        Ok(End::Exited(exited)) => Ok(exit_code(exited.exit_code)),
        Ok(End::Signal(signal)) => {
            // The window is gone, and nobody comes back for what was in it.
            let request = v1::DestroyTerminalRequest {
                terminal_id,
                grace_ms: 0,
            };
            let goodbye = client.destroy_terminal(request);
            let _ = tokio::time::timeout(GOODBYE_WITHIN, goodbye).await;
            Ok(exit_code(128 + signal))
        }
        Err(failure) => {
            output::note(&format!(
                "the terminal may live on: k8e sandbox shell --attach {terminal_id}"
            ));
            Err(failure)
        }
    }
}

/// Carries what is typed in and what is said out, up to the end of the terminal.
async fn drive(
    client: &mut Client,
    signals: &mut Signals,
    terminal_id: &str,
) -> Result<End, Failure> {
    let request = v1::AttachTerminalRequest {
        terminal_id: terminal_id.to_owned(),
    };
    let mut events = client.attach_terminal(request).await?.into_inner();
    let mut raw = Raw::new();
    let mut typing = tokio::spawn(type_in(client.clone(), terminal_id.to_owned()));
    let mut typed = false;
    let end = loop {
        tokio::select! {
            event = events.message() => match event?.and_then(|event| event.event) {
                Some(Event::Data(data)) => raw.stdout(&data).await?,
                Some(Event::Exited(exited)) => break End::Exited(exited),
                None => return Err(Failure::request("the server ended the terminal without saying how it went", "internal")),
            },
            signal = signals.next() => match signal {
                None => resize(client, terminal_id).await?,
                Some(signal) => break End::Signal(signal),
            },
            done = &mut typing, if !typed => {
                typed = true;
                // A terminal that takes no more is over, and is about to say so.
                if let Ok(Err(failure)) = done && failure.exit() != EXIT_REQUEST {
                    return Err(failure);
                }
            }
        }
    };
    typing.abort();
    Ok(end)
}

async fn resize(client: &mut Client, terminal_id: &str) -> Result<(), Failure> {
    let (rows, cols) = tty::size();
    let request = v1::ResizeTerminalRequest {
        terminal_id: terminal_id.to_owned(),
        rows,
        cols,
    };
    // One that is over has no size.
    match client.resize_terminal(request).await.map_err(Failure::from) {
        Err(failure) if failure.exit() != EXIT_REQUEST => Err(failure),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// One message after the other, so that what is typed stays in order.
async fn type_in(mut client: Client, terminal_id: String) -> Result<(), Failure> {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; INPUT_BYTES];
    loop {
        let length = stdin.read(&mut buffer).await.unwrap_or(0);
        if length == 0 {
            return Ok(());
        }
        let request = v1::WriteTerminalRequest {
            terminal_id: terminal_id.clone(),
            data: buffer[..length].to_vec().into(),
        };
        client.write_terminal(request).await?;
    }
}
