//! `k8e sandbox exec`: a program and its arguments, as they are, in a given session.

use super::stream::{CommandArgs, Request, drive};
use crate::failure::Failure;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use k8e_model::{Command, Program};
use std::ffi::OsString;

/// What `k8e sandbox exec --help` begins with.
pub(super) const LONG_ABOUT: &str = "\
Execute a program with its arguments in a session, without a shell: nothing is expanded or quoted.
The exit code is the program's own. Flags of k8e come before the program.";

/// Arguments of `k8e sandbox exec`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox exec $SID -- ls -la /workspace
  k8e sandbox exec $SID --raw --timeout never -- python3 server.py
  tar c . | k8e sandbox exec $SID --stdin --raw -- tar x")]
pub struct ExecArgs {
    /// The session
    #[arg(value_name = "SESSION")]
    session_id: String,

    #[command(flatten)]
    command: CommandArgs,

    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    argv: Vec<OsString>,
}

// === impl ExecArgs ===

impl ExecArgs {
    pub(crate) fn raw(&self) -> bool {
        self.command.raw()
    }

    /// The request: checked, not sent yet.
    pub(crate) fn request(self) -> Result<Request, Failure> {
        let argv: Vec<Vec<u8>> = self
            .argv
            .into_iter()
            .map(OsString::into_encoded_bytes)
            .collect();
        Command::new(Program::Argv(argv.clone()))?;
        let mut request = self.command.request();
        request.start.session_id = self.session_id;
        let argv = v1::Argv {
            args: argv.into_iter().map(Into::into).collect(),
        };
        request.start.program = Some(v1::run_start::Program::Argv(argv));
        Ok(request)
    }
}

pub(crate) async fn run(request: Request, client: Client) -> Result<u8, Failure> {
    drive(client, request).await
}
