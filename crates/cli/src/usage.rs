//! Usage errors as one sentence for JSON: the missing argument, or the nearest command to an unknown one.

use clap::error::{ContextKind, ContextValue, Error, ErrorKind};
use std::ffi::OsString;

/// Command names of other tools, and the command here that does the same.
const OTHER_NAMES: [(&str, &str); 8] = [
    ("cat", "read"),
    ("delete", "destroy"),
    ("kill", "destroy"),
    ("ls", "sessions"),
    ("new", "create"),
    ("ssh", "shell"),
    ("stop", "destroy"),
    ("upload", "write"),
];

/// Longest part of an unknown command that is compared and printed; no command is longer.
const WORD_CHARS_MAX: usize = 64;

/// A usage error.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    /// What is missing or unknown.
    pub(crate) error: String,
    /// How the command is used, and where its help is.
    pub(crate) detail: String,
}

/// Describes a parse error; `whole` is the complete command line.
///
/// For an unknown command the nearest one is added to `error`, so that clap shows it too.
pub(crate) fn describe(error: &mut Error, args: &[OsString], whole: &clap::Command) -> Usage {
    let path = path(args, whole);
    let nearest = unknown_command(error).and_then(|word| nearest(&word, &path, whole));
    if let Some(nearest) = &nearest {
        let suggestion = ContextValue::Strings(vec![nearest.clone()]);
        error.insert(ContextKind::SuggestedSubcommand, suggestion);
    }
    let text = match (error.kind(), unknown_command(error)) {
        (_, Some(word)) => {
            let hint = nearest.map(|name| format!(": the nearest command is `{name}`"));
            format!("unknown command {word:?}{}", hint.unwrap_or_default())
        }
        (ErrorKind::MissingRequiredArgument, _) => missing(error),
        (ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand, _) => {
            format!("missing command after `{}`", path.join(" "))
        }
        _ => first_paragraph(error),
    };
    let usage = usage_line(&path, whole);
    let help = format!("see `{} --help`", path.join(" "));
    Usage {
        error: text,
        detail: format!("usage: {usage}; {help}"),
    }
}

/// Usage line of a command. Not taken from clap's error, which includes values of environment variables.
fn usage_line(path: &[String], whole: &clap::Command) -> String {
    let mut whole = whole.clone();
    whole.build();
    let mut at = &mut whole;
    for name in &path[1..] {
        at = match at.find_subcommand_mut(name) {
            Some(next) => next,
            None => return path.join(" "),
        };
    }
    let usage = one_line(&at.render_usage().to_string());
    usage.trim_start_matches("Usage:").trim().to_owned()
}

/// The typed command names, as far as they exist.
fn path(args: &[OsString], whole: &clap::Command) -> Vec<String> {
    let (mut at, mut path) = (whole, vec![whole.get_name().to_owned()]);
    for arg in args.iter().skip(1) {
        if arg == "--" {
            break;
        }
        // The value of a flag is no command, or it would have to be named like one.
        if let Some(next) = arg.to_str().and_then(|name| at.find_subcommand(name)) {
            path.push(next.get_name().to_owned());
            at = next;
        }
    }
    path
}

fn unknown_command(error: &Error) -> Option<String> {
    match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(word)) => Some(word.chars().take(WORD_CHARS_MAX).collect()),
        _ => None,
    }
}

/// The command that was most likely meant, as it is typed.
fn nearest(word: &str, path: &[String], whole: &clap::Command) -> Option<String> {
    let below = |path: &[String]| {
        let mut at = whole;
        for name in &path[1..] {
            at = at.find_subcommand(name)?;
        }
        Some(at)
    };
    let spell = |path: &[String], name: &str| format!("{} {name}", path.join(" "));
    let here = below(path)?;
    let other = OTHER_NAMES.iter().find(|(other, _)| *other == word);
    let wanted = other.map_or(word, |(_, ours)| ours);
    if here.find_subcommand(wanted).is_some() {
        return Some(spell(path, wanted));
    }
    // `k8e run` is `k8e sandbox run`.
    let deeper = here.get_subcommands().find(|command| {
        let found = command.find_subcommand(wanted);
        found.is_some_and(|found| !found.is_hide_set())
    });
    if let Some(deeper) = deeper {
        return Some(format!("{} {wanted}", spell(path, deeper.get_name())));
    }
    let names = here.get_subcommands().filter(|name| !name.is_hide_set());
    let names = names.map(clap::Command::get_name);
    let near = names.min_by_key(|name| distance(word, name))?;
    Some(spell(path, near))
}

/// Characters to insert, remove or replace to get from one word to the other.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

fn missing(error: &Error) -> String {
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::Strings(names)) if names.len() == 1 => {
            format!("missing argument {}", names[0])
        }
        Some(ContextValue::Strings(names)) => format!("missing arguments {}", names.join(", ")),
        _ => first_paragraph(error),
    }
}

/// What clap says, up to its tips and the usage, with a flag that may have been meant.
fn first_paragraph(error: &Error) -> String {
    let said = error.to_string();
    let first = said.split("\n\n").next().unwrap_or_default();
    let text = one_line(first.trim_start_matches("error: "));
    match error.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(flag)) => format!("{text}: the nearest flag is {flag}"),
        _ => text,
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (from, to, want) in [
            ("", "run", 3),
            ("run", "run", 0),
            ("rn", "run", 1),
            ("dance", "cancel", 2),
            ("sesions", "sessions", 1),
        ] {
            assert_eq!(distance(from, to), want, "{from} {to}");
        }
    }
}
