//! `k8e sandbox exec`: executes a program with arguments in a session, without a shell.

use super::files::path_bytes;
use super::stream::{CommandArgs, Request};
use crate::failure::Failure;
use bytes::Bytes;
use clap::Args;
use k8e_api::v1;
use k8e_model::check_argv;
use std::ffi::OsString;

/// First paragraphs of `k8e sandbox exec --help`.
pub(super) const LONG_ABOUT: &str = "\
Execute a program with arguments in a session, without a shell: nothing is expanded or quoted.
The exit code is that of the program. Flags of k8e come before the program.";

/// Arguments of `k8e sandbox exec`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox exec $SID -- ls -la /workspace
  k8e sandbox exec $SID --raw --timeout never -- python3 server.py
  tar c . | k8e sandbox exec $SID --stdin --raw -- tar x")]
pub struct ExecArgs {
    /// Id of the session
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
        let args: Vec<Bytes> = self.argv.into_iter().map(path_bytes).collect();
        check_argv(&args)?;
        let mut request = self.command.request();
        request.start.session_id = self.session_id;
        request.start.program = Some(v1::run_start::Program::Argv(v1::Argv { args }));
        Ok(request)
    }
}
