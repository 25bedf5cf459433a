//! Deferred clap arguments: the flags of a command are built only when that command was typed.
//!
//! Building the flags of all commands takes longer than most commands need. Clap's own `defer` would print other help:
//! global flags first, and the doc comment of the argument type in place of the command's.

use clap::builder::Resettable;
use clap::error::Error;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

/// Arguments of a subcommand, built when it is the one that was typed.
#[derive(Clone, Debug)]
pub struct Late<T>(pub T);

impl<T: Args> Args for Late<T> {
    fn augment_args(command: Command) -> Command {
        command.defer(describe::<T>)
    }

    fn augment_args_for_update(command: Command) -> Command {
        T::augment_args_for_update(command)
    }
}

impl<T: FromArgMatches> FromArgMatches for Late<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        T::from_arg_matches(matches).map(Self)
    }

    fn from_arg_matches_mut(matches: &mut ArgMatches) -> Result<Self, Error> {
        T::from_arg_matches_mut(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches(matches)
    }
}

/// The command as if `T` had been built at once: global flags come last.
fn describe<T: Args>(command: Command) -> Command {
    let (about, long_about) = (command.get_about(), command.get_long_about());
    let (about, long_about) = (about.cloned(), long_about.cloned());
    let for_everybody = command.get_arguments().count();
    let command = T::augment_args(command)
        .about(Resettable::from(about))
        .long_about(Resettable::from(long_about));
    let mut args: Vec<Arg> = command.get_arguments().cloned().collect();
    args.rotate_left(for_everybody);
    let mut args = args.into_iter();
    command.mut_args(|arg| args.next().unwrap_or(arg))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Parser, Subcommand};

    /// Not what help shows.
    #[derive(Args)]
    #[command(after_help = "Examples")]
    struct Flags {
        #[arg(long, help_heading = "Network")]
        _host: Option<String>,
        _file: Option<String>,
    }

    #[derive(Parser)]
    #[command(name = "k8e")]
    struct Whole<F: Args> {
        #[arg(long, global = true, help_heading = "Connection")]
        _endpoint: Option<String>,
        #[command(subcommand)]
        _command: Command<F>,
    }

    #[derive(Subcommand)]
    enum Command<F: Args> {
        /// What help shows
        #[command(long_about = "What long help shows")]
        Get(F),
    }

    #[test]
    fn help_is_the_same() {
        fn help<F: Args>(flag: &str) -> String {
            let result = Whole::<F>::try_parse_from(["k8e", "get", flag]);
            result.err().unwrap().to_string()
        }
        for flag in ["-h", "--help", "--wrong"] {
            assert_eq!(help::<Late<Flags>>(flag), help::<Flags>(flag));
        }
        assert!(help::<Flags>("-h").starts_with("What help shows\n"));
    }
}
