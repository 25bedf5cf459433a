//! `k8e sandbox shell`: an interactive shell, or another program, in a terminal (PTY) of a session.

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

/// Read buffer of standard input: a pasted page.
const INPUT_BYTES: usize = 64 * 1024;

/// Longest wait for the server to close the terminal when a signal ends this command.
const GOODBYE_WITHIN: Duration = Duration::from_secs(3);

/// First paragraphs of `k8e sandbox shell --help`.
pub(super) const LONG_ABOUT: &str = "\
Open an interactive shell, or another program, in a terminal of a session. All keys are sent to it, also
Ctrl-C; the exit code is that of the program.

When the connection is lost the terminal keeps running: reconnect with --attach.";

/// Arguments of `k8e sandbox shell`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox shell
  k8e sandbox shell $SID
  k8e sandbox shell $SID -- python3 -q
  k8e sandbox shell --attach term-…")]
pub struct ShellArgs {
    /// Id of the session [default: the one that `k8e sandbox run` uses, created if there is none]
    #[arg(value_name = "SESSION", env = "K8E_SANDBOX_SESSION_ID")]
    session_id: Option<String>,

    /// Attach to an existing terminal, by its id
    #[arg(long, value_name = "TERMINAL", conflicts_with_all = ["argv", "env", "workdir", "user"])]
    attach: Option<String>,

    /// Environment variable of the program; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = units::pair)]
    env: Vec<(String, String)>,

    /// Working directory in the sandbox [default: /workspace]
    #[arg(long, value_name = "DIR")]
    workdir: Option<String>,

    /// User in the sandbox that it runs as [default: root]
    #[arg(long, value_name = "USER")]
    user: Option<String>,

    #[command(flatten)]
    spec: SpecArgs,

    /// The program and its arguments [default: bash]
    #[arg(last = true, value_name = "COMMAND")]
    argv: Vec<OsString>,
}

/// The validated request.
pub(crate) enum Request {
    Create(Box<v1::CreateTerminalRequest>),
    Attach(String),
}

/// How reading a terminal ended.
enum End {
    Exited(v1::TerminalExited),
    /// A signal ended this command.
    Signal(i32),
}

// === impl ShellArgs ===

impl ShellArgs {
    /// Builds the request; fails where standard input or output is not a terminal.
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
    // Not before: until there is a terminal, Ctrl-C ends this command as any other.
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
            // The user's terminal window was closed: end the terminal in the sandbox too.
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
                "the terminal may still be running: k8e sandbox shell --attach {terminal_id}"
            ));
            Err(failure)
        }
    }
}

/// Relays input and output until the terminal ends.
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
                None => return Err(Failure::request("the server closed the stream without the exit code of the terminal", "internal")),
            },
            signal = signals.next() => match signal {
                None => resize(client, terminal_id).await?,
                Some(signal) => break End::Signal(signal),
            },
            done = &mut typing, if !typed => {
                typed = true;
                // A terminal that takes no more input has ended; its exit code follows.
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
    // Fails for a terminal that has ended, which does not matter.
    match client.resize_terminal(request).await.map_err(Failure::from) {
        Err(failure) if failure.exit() != EXIT_REQUEST => Err(failure),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Sends input one message at a time, to keep its order.
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
