//! `k8e catalog`: the command tree as JSON, for agents and tools that generate command lines.
//!
//! It is generated from the clap definitions that parse the command line, so it cannot differ from them.

use crate::failure::Failure;
use crate::output;
use clap::{Arg, ArgAction, Args, Command};
use serde::Serialize;
use std::ffi::OsStr;

/// Version of the layout: raised when a key changes its meaning or is removed.
const CATALOG_VERSION: u32 = 1;

/// What `k8e catalog --help` begins with.
pub(crate) const LONG_ABOUT: &str = "\
Print the command tree as JSON: commands with their arguments, flags, defaults, allowed values,
environment variables and help texts, and the exit codes. Needs no server.";

/// Exit codes of client commands; the same as in `failure.rs`.
const EXIT_CODES: [ExitCodeJson; 5] = [
    ExitCodeJson::new(
        0,
        "success; `run`, `exec` and `poll --follow`: the command exited with 0",
    ),
    ExitCodeJson::new(
        1,
        "the request failed, or the command line is wrong: `error` and `detail` say why",
    ),
    ExitCodeJson::new(2, "no server could be reached: `k8e sandbox status`"),
    ExitCodeJson::new(130, "interrupted (Ctrl-C)"),
    ExitCodeJson::new(
        141,
        "the reader of standard output closed it; `run` and `exec` exit with the exit code of the command",
    ),
];

/// Arguments of `k8e catalog`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e catalog | jq -r '.commands[] | \"\\(.name): \\(.usage)\"'
  k8e catalog sandbox run | jq -r '.flags[].name'")]
pub struct CatalogArgs {
    /// Only this command, as `sandbox run` [default: all commands]
    #[arg(value_name = "COMMAND")]
    path: Vec<String>,
}

/// The whole tree. `name`, `usage` and `flags` are keys of the Go K8E.
#[derive(Serialize)]
struct CatalogJson {
    catalog_version: u32,
    version: String,
    exit_codes: [ExitCodeJson; 5],
    /// Flags that every command takes, before or after its name.
    global_flags: Vec<FlagJson>,
    commands: Vec<CommandJson>,
}

#[derive(Serialize)]
struct ExitCodeJson {
    code: u8,
    meaning: &'static str,
}

/// A command, with those below it.
#[derive(Serialize)]
pub(crate) struct CommandJson {
    name: String,
    /// The command as it is typed: `k8e sandbox run`.
    command: String,
    /// What it does, in one line.
    usage: String,
    /// How it is typed, with its arguments.
    synopsis: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    help: String,
    /// Examples, and what its output has.
    #[serde(skip_serializing_if = "String::is_empty")]
    examples: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    aliases: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    arguments: Vec<FlagJson>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    flags: Vec<FlagJson>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    commands: Vec<CommandJson>,
}

/// A flag, or a positional argument.
#[derive(Serialize)]
struct FlagJson {
    /// Without dashes.
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    short: Option<char>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    aliases: Vec<String>,
    usage: String,
    /// Placeholder of its value; absent for a switch.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    required: bool,
    /// Whether it may be given more than once, or takes several values.
    repeated: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    default: Vec<String>,
    /// Allowed values, when there are only these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    values: Vec<String>,
    /// Environment variable that sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    env: Option<String>,
}

pub(crate) fn run(args: &CatalogArgs, whole: Command) -> Result<u8, Failure> {
    let whole = built(whole);
    if args.path.is_empty() {
        return output::json(&CatalogJson::new(&whole)).map(|()| 0);
    }
    let command = command_json(&whole, &args.path).ok_or_else(|| {
        let typed = args.path.join(" ");
        let error = format!(
            "unknown command {typed:?}: `k8e catalog | jq -r '.commands[].name'` has the names"
        );
        Failure::request(error, "not_found")
    })?;
    output::json(&command).map(|()| 0)
}

/// The command with the arguments of all its subcommands, which are otherwise defined when they are typed.
pub(crate) fn built(mut whole: Command) -> Command {
    whole.build();
    whole
}

/// One command of a built tree; `None` when there is no such command.
pub(crate) fn command_json(whole: &Command, path: &[impl AsRef<str>]) -> Option<CommandJson> {
    let mut typed = whole.get_name().to_owned();
    let mut at = whole;
    for name in path {
        at = at.find_subcommand(name.as_ref()).filter(|c| is_shown(c))?;
        typed = format!("{typed} {}", at.get_name());
    }
    Some(CommandJson::new(at, typed))
}

fn is_shown(command: &Command) -> bool {
    !command.is_hide_set() && command.get_name() != "help"
}

fn text(styled: Option<&clap::builder::StyledStr>) -> String {
    styled.map(ToString::to_string).unwrap_or_default()
}

// === impl CatalogJson ===

impl CatalogJson {
    fn new(whole: &Command) -> Self {
        let global = whole.get_arguments().filter(|arg| arg.is_global_set());
        Self {
            catalog_version: CATALOG_VERSION,
            version: whole.get_version().unwrap_or_default().to_owned(),
            exit_codes: EXIT_CODES,
            global_flags: global.filter_map(FlagJson::new).collect(),
            commands: commands(whole, whole.get_name()),
        }
    }
}

// === impl ExitCodeJson ===

impl ExitCodeJson {
    const fn new(code: u8, meaning: &'static str) -> Self {
        Self { code, meaning }
    }
}

// === impl CommandJson ===

impl CommandJson {
    fn new(command: &Command, typed: String) -> Self {
        let own = || command.get_arguments().filter(|arg| !arg.is_global_set());
        let usage = command.clone().render_usage().to_string();
        let usage: Vec<&str> = usage.split_whitespace().collect();
        let examples = command.get_after_long_help().or(command.get_after_help());
        Self {
            name: command.get_name().to_owned(),
            usage: text(command.get_about()),
            synopsis: usage.join(" ").trim_start_matches("Usage: ").to_owned(),
            help: text(command.get_long_about()),
            examples: text(examples),
            aliases: command.get_visible_aliases().map(str::to_owned).collect(),
            arguments: own()
                .filter(|arg| arg.is_positional())
                .filter_map(FlagJson::new)
                .collect(),
            flags: own()
                .filter(|arg| !arg.is_positional())
                .filter_map(FlagJson::new)
                .collect(),
            commands: commands(command, &typed),
            command: typed,
        }
    }

    /// What it does, in one line.
    pub(crate) fn usage(&self) -> &str {
        &self.usage
    }

    /// Its flags as they are typed.
    pub(crate) fn flag_names(&self) -> impl Iterator<Item = String> {
        self.flags.iter().map(|flag| format!("--{}", flag.name))
    }
}

fn commands(command: &Command, typed: &str) -> Vec<CommandJson> {
    let shown = command.get_subcommands().filter(|below| is_shown(below));
    shown
        .map(|below| CommandJson::new(below, format!("{typed} {}", below.get_name())))
        .collect()
}

// === impl FlagJson ===

impl FlagJson {
    /// `None` for what no command line needs: hidden flags, `--help` and `--version`.
    fn new(arg: &Arg) -> Option<Self> {
        let action = arg.get_action();
        let informs = matches!(
            action,
            ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
        );
        if arg.is_hide_set() || informs {
            return None;
        }
        let takes_value = action.takes_values();
        let names = arg.get_value_names().unwrap_or_default();
        let name = match arg.is_positional() {
            true => names.first().map_or(arg.get_id().as_str(), |name| name),
            false => arg.get_long().unwrap_or(arg.get_id().as_str()),
        };
        let text_of = |value: &OsStr| value.to_string_lossy().into_owned();
        let many = arg.get_num_args().is_some_and(|n| n.max_values() > 1);
        let values = arg.get_possible_values();
        let values = values.iter().filter(|value| !value.is_hide_set());
        Some(Self {
            name: name.to_owned(),
            short: arg.get_short(),
            aliases: arg
                .get_visible_aliases()
                .unwrap_or_default()
                .into_iter()
                .map(str::to_owned)
                .collect(),
            usage: text(arg.get_help()),
            value: (takes_value && !arg.is_positional())
                .then(|| names.first().map(ToString::to_string))
                .flatten(),
            required: arg.is_required_set(),
            repeated: many || matches!(action, ArgAction::Append | ArgAction::Count),
            default: match takes_value {
                true => arg
                    .get_default_values()
                    .iter()
                    .map(|v| text_of(v))
                    .collect(),
                false => Vec::new(),
            },
            values: match takes_value {
                true => values.map(|value| value.get_name().to_owned()).collect(),
                false => Vec::new(),
            },
            // The name only: the value may be an API key.
            env: arg.get_env().map(text_of),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn whole() -> Command {
        built(crate::tests::whole())
    }

    fn catalog() -> Value {
        serde_json::to_value(CatalogJson::new(&whole())).unwrap()
    }

    fn flag<'a>(command: &'a Value, name: &str) -> &'a Value {
        let flags = command["flags"].as_array().unwrap();
        let found = flags.iter().find(|flag| flag["name"] == name);
        found.unwrap_or_else(|| panic!("no {name} in {command:#}"))
    }

    #[test]
    fn a_command_is_described_in_full() {
        let run = command_json(&whole(), &["sandbox", "run"]).unwrap();
        let run = serde_json::to_value(run).unwrap();
        assert_eq!(run["command"], "k8e sandbox run");
        assert_eq!(run["usage"], "Run code, or a shell command, in a sandbox");
        assert_eq!(run["synopsis"], "k8e sandbox run [OPTIONS] [CODE]");
        assert!(
            run["examples"]
                .as_str()
                .unwrap()
                .contains("k8e sandbox run")
        );
        assert_eq!(run["arguments"][0]["name"], "CODE");
        assert_eq!(run["arguments"][0]["required"], false);
        assert_eq!(flag(&run, "lang")["default"][0], "bash");
        let write = command_json(&whole(), &["sandbox", "write"]).unwrap();
        let write = serde_json::to_value(write).unwrap();
        assert_eq!(
            flag(&write, "mode")["values"],
            serde_json::json!(["w", "a"])
        );
        assert_eq!(write["arguments"][1]["required"], true);
        assert_eq!(flag(&run, "raw")["value"], Value::Null);
        assert_eq!(flag(&run, "env")["repeated"], true);
        assert_eq!(flag(&run, "session-id")["env"], "K8E_SANDBOX_SESSION_ID");
        let list = command_json(&whole(), &["sandbox", "list"]).unwrap();
        let list = serde_json::to_value(list).unwrap();
        assert_eq!(flag(&list, "limit")["default"][0], "10000");
        assert!(command_json(&whole(), &["sandbox", "dance"]).is_none());
        assert!(command_json(&whole(), &["help"]).is_none());
    }

    #[test]
    fn global_flags_are_listed_once_and_help_never() {
        let catalog = catalog();
        assert_eq!(catalog["catalog_version"], 1);
        let global = flag(
            &serde_json::json!({ "flags": catalog["global_flags"] }),
            "data-dir",
        )
        .clone();
        assert_eq!(global["default"][0], "/var/lib/k8e");
        assert_eq!(global["env"], "K8E_DATA_DIR");
        let commands = catalog["commands"].to_string();
        for name in ["data-dir", "apikey", "help", "version"] {
            assert!(
                !commands.contains(&format!("{{\"name\":\"{name}\",\"required\"")),
                "{name}"
            );
            assert!(
                !commands.contains(&format!("\"name\":\"{name}\",\"repeated\"")),
                "{name}"
            );
        }
    }

    /// Every leaf of the tree, as clap has it: names, one-line help, and the flags' help.
    #[test]
    fn no_command_is_without_help() {
        fn check(command: &Value) {
            let name = command["command"].as_str().unwrap();
            assert_ne!(command["usage"], "", "{name}");
            let empty = Vec::new();
            let list = |key: &str| command[key].as_array().unwrap_or(&empty).clone();
            for flag in list("flags").iter().chain(&list("arguments")) {
                assert_ne!(flag["usage"], "", "{name}: {flag}");
            }
            list("commands").iter().for_each(check);
        }
        let catalog = catalog();
        let commands = catalog["commands"].as_array().unwrap();
        assert!(commands.len() > 8, "{}", commands.len());
        commands.iter().for_each(check);
    }
}
