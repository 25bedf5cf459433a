//! `k8e completion`: shell completion scripts.

use crate::failure::Failure;
use crate::output;
use clap::Args;
use clap_complete::Shell;

/// Arguments of `k8e completion`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  source <(k8e completion bash)
  k8e completion zsh > ~/.zfunc/_k8e
  k8e completion fish > ~/.config/fish/completions/k8e.fish")]
pub struct CompletionArgs {
    /// Shell to print the script for
    #[arg(value_enum)]
    shell: Shell,
}

pub(crate) fn run(args: CompletionArgs, mut whole: clap::Command) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut whole, "k8e", &mut script);
    output::text(&script).map(|()| 0)
}
