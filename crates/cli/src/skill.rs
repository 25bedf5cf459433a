//! `k8e skill` and `k8e sandbox-install-skill`: a skill document (SKILL.md) that teaches coding agents to use k8e.
//!
//! The text is `skill/body.md`; its command reference is generated from the command tree. Tests parse every command line
//! that it shows and run it against a server.

use crate::catalog;
use crate::failure::Failure;
use crate::output;
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

/// What `k8e skill --help` begins with.
pub(crate) const LONG_ABOUT: &str = "\
Install a skill for coding agents: a document (SKILL.md) that tells them when and how to run code in
sandboxes with this command line.

  k8e skill install claude            # for you: ~/.claude/skills/k8e-sandbox/SKILL.md
  k8e skill install codex --project   # for this project: .codex/skills/k8e-sandbox/SKILL.md
  k8e skill print                     # for an agent that is not listed";

/// Name of the skill, and of its directory.
const NAME: &str = "k8e-sandbox";
const FILE: &str = "SKILL.md";

/// Line of the front matter by which an installed document is recognised as one of k8e's.
const MARK: &str = "  generator: k8e ";

/// Front matter is at the beginning: no more is read of an installed document to find [`MARK`].
const HEAD_BYTES_MAX: u64 = 4096;

/// What agents decide by whether to read the skill.
const DESCRIPTION: &str = "Run code, shell commands, tests, package installations and data analysis in an isolated k8e \
    sandbox, never directly on this machine. Use it whenever the user asks to run, execute, try, test, install, \
    compute, plot or analyse something. 用户要求运行、执行、试试、测试、安装、计算、画图或分析代码和数据文件时使用。";

const BODY: &str = include_str!("skill/body.md");

/// Commands of the reference, in its order.
const REFERENCE: [&[&str]; 28] = [
    &["sandbox", "run"],
    &["sandbox", "create"],
    &["sandbox", "sessions"],
    &["sandbox", "get"],
    &["sandbox", "destroy"],
    &["sandbox", "prune"],
    &["sandbox", "cp"],
    &["sandbox", "write"],
    &["sandbox", "read"],
    &["sandbox", "list"],
    &["sandbox", "rm"],
    &["sandbox", "exec"],
    &["sandbox", "poll"],
    &["sandbox", "runs"],
    &["sandbox", "cancel"],
    &["sandbox", "log"],
    &["sandbox", "events"],
    &["sandbox", "ps"],
    &["sandbox", "allow-hosts"],
    &["sandbox", "egress"],
    &["sandbox", "expose"],
    &["sandbox", "subagent"],
    &["sandbox", "snapshot", "save"],
    &["sandbox", "snapshot", "restore"],
    &["sandbox", "pause"],
    &["sandbox", "resume"],
    &["sandbox", "confirm"],
    &["sandbox", "status"],
];

/// The commands of `k8e skill`.
#[derive(Subcommand, Debug)]
pub enum SkillCommand {
    /// Install the skill, or bring an installed one up to date
    Install(InstallArgs),
    /// Remove the skill
    Uninstall(UninstallArgs),
    /// Print the skill
    Print,
}

/// Arguments of `k8e skill install`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
A document of that name that k8e did not write is kept, unless --force is given.

Output:
  {\"ok\":true,\"skills\":[{\"agent\":\"claude\",\"path\":\"…/SKILL.md\",\"status\":\"installed\"}]}
  status is installed, updated or unchanged.

Examples:
  k8e skill install claude codex
  k8e skill install all --project")]
pub struct InstallArgs {
    /// Agents to install it for, or all [default: those that have a directory]
    #[arg(value_enum, value_name = "AGENT")]
    agents: Vec<AgentArg>,

    #[command(flatten)]
    place: PlaceArgs,

    /// Replace a document that k8e did not write
    #[arg(long)]
    force: bool,
}

/// Arguments of `k8e skill uninstall`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
A document of that name that k8e did not write is kept.

Output:
  {\"ok\":true,\"skills\":[{\"agent\":\"claude\",\"path\":\"…/SKILL.md\",\"status\":\"removed\"}]}
  status is removed or absent.

Example:
  k8e skill uninstall claude")]
pub struct UninstallArgs {
    /// Agents to remove it from [default: all]
    #[arg(value_enum, value_name = "AGENT")]
    agents: Vec<AgentArg>,

    #[command(flatten)]
    place: PlaceArgs,
}

/// Where agents look for skills.
#[derive(Args, Debug)]
struct PlaceArgs {
    /// The project in this directory instead of the user's home; the current directory when none is named
    #[arg(
        long,
        value_name = "DIR",
        num_args = 0..=1,
        default_missing_value = ".",
        require_equals = true
    )]
    project: Option<PathBuf>,
}

/// A coding agent, or all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum AgentArg {
    Claude,
    Codex,
    Gemini,
    Kiro,
    Openclaw,
    Pi,
    All,
}

/// Where one agent looks for skills.
#[derive(Debug)]
struct Agent {
    name: &'static str,
    kind: AgentArg,
    /// Environment variable with the agent's own directory.
    dir_env: Option<&'static str>,
    /// The agent's directory in the home of a user and in a project.
    dir: &'static str,
    /// Skills below it, for a user.
    user_skills: &'static str,
}

const AGENTS: [Agent; 6] = [
    Agent::new(
        "claude",
        AgentArg::Claude,
        Some("CLAUDE_CONFIG_DIR"),
        ".claude",
        "skills",
    ),
    Agent::new(
        "codex",
        AgentArg::Codex,
        Some("CODEX_HOME"),
        ".codex",
        "skills",
    ),
    Agent::new("gemini", AgentArg::Gemini, None, ".gemini", "skills"),
    Agent::new("kiro", AgentArg::Kiro, None, ".kiro", "skills"),
    Agent::new("openclaw", AgentArg::Openclaw, None, ".openclaw", "skills"),
    Agent::new("pi", AgentArg::Pi, None, ".pi", "agent/skills"),
];

#[derive(Serialize)]
struct SkillsJson {
    ok: bool,
    skills: Vec<SkillJson>,
}

#[derive(Serialize)]
struct SkillJson {
    agent: &'static str,
    path: String,
    status: &'static str,
}

/// An installed document.
#[derive(Debug, PartialEq, Eq)]
enum Installed {
    Absent,
    /// Written by k8e, and whether it is the text of this version.
    Ours {
        same: bool,
    },
    Foreign,
}

// === impl SkillCommand ===

impl SkillCommand {
    /// Whether standard output is JSON; errors are printed as JSON then too.
    pub(crate) fn prints_json(&self) -> bool {
        match self {
            Self::Install(_) | Self::Uninstall(_) => true,
            Self::Print => false,
        }
    }
}

pub(crate) fn run(command: SkillCommand, whole: clap::Command) -> Result<u8, Failure> {
    match command {
        SkillCommand::Install(args) => install(&args, whole),
        SkillCommand::Uninstall(args) => uninstall(&args),
        SkillCommand::Print => output::text(document(whole).as_bytes()).map(|()| 0),
    }
}

pub(crate) fn install(args: &InstallArgs, whole: clap::Command) -> Result<u8, Failure> {
    let document = document(whole);
    let mut skills = Vec::new();
    for (agent, root) in chosen(&args.agents, &args.place)? {
        let path = root.join(NAME).join(FILE);
        let failed = |error: io::Error| {
            Failure::io(&format!("install the skill in {}", path.display()), &error)
        };
        let status = match installed(&path, document.as_bytes()).map_err(failed)? {
            Installed::Ours { same: true } => "unchanged",
            Installed::Foreign if !args.force => {
                let error = format!(
                    "{} was not written by k8e: --force replaces it, `k8e skill print` shows what would be written",
                    path.display()
                );
                return Err(Failure::request(error, "already_exists"));
            }
            was @ (Installed::Absent | Installed::Ours { .. } | Installed::Foreign) => {
                replace(&path, document.as_bytes()).map_err(failed)?;
                match was {
                    Installed::Absent => "installed",
                    Installed::Ours { .. } | Installed::Foreign => "updated",
                }
            }
        };
        skills.push(SkillJson::new(agent, &path, status));
    }
    output::json(&SkillsJson { ok: true, skills }).map(|()| 0)
}

fn uninstall(args: &UninstallArgs) -> Result<u8, Failure> {
    let all = [AgentArg::All];
    let agents = match args.agents.is_empty() {
        true => &all[..],
        false => &args.agents,
    };
    let mut skills = Vec::new();
    for (agent, root) in chosen(agents, &args.place)? {
        let path = root.join(NAME).join(FILE);
        let failed = |error: io::Error| Failure::io(&format!("remove {}", path.display()), &error);
        let status = match installed(&path, b"").map_err(failed)? {
            Installed::Absent => "absent",
            Installed::Ours { .. } => {
                std::fs::remove_file(&path).map_err(failed)?;
                // Kept when somebody put something else there.
                let _ = std::fs::remove_dir(root.join(NAME));
                "removed"
            }
            Installed::Foreign => {
                let error = format!(
                    "{} was not written by k8e: remove it yourself if it is not needed",
                    path.display()
                );
                return Err(Failure::request(error, "precondition"));
            }
        };
        skills.push(SkillJson::new(agent, &path, status));
    }
    output::json(&SkillsJson { ok: true, skills }).map(|()| 0)
}

/// Agents whose installed skill is of another version.
pub(crate) fn stale(whole: clap::Command) -> Vec<&'static str> {
    let document = document(whole);
    let place = PlaceArgs { project: None };
    let chosen = chosen(&[AgentArg::All], &place).unwrap_or_default();
    let is_stale = |path: &Path| {
        let found = installed(path, document.as_bytes());
        found.is_ok_and(|found| found == Installed::Ours { same: false })
    };
    chosen
        .into_iter()
        .filter(|(_, root)| is_stale(&root.join(NAME).join(FILE)))
        .map(|(agent, _)| agent.name)
        .collect()
}

/// The agents that are meant, with their directory for skills.
fn chosen(
    named: &[AgentArg],
    place: &PlaceArgs,
) -> Result<Vec<(&'static Agent, PathBuf)>, Failure> {
    let mut chosen = Vec::new();
    for agent in &AGENTS {
        let dir = agent.dir(place)?;
        let is_meant = match named {
            [] => dir.is_dir(),
            named => named.contains(&AgentArg::All) || named.contains(&agent.kind),
        };
        if is_meant {
            chosen.push((agent, agent.skills(&dir, place)));
        }
    }
    if chosen.is_empty() {
        let names: Vec<&str> = AGENTS.iter().map(|agent| agent.name).collect();
        let error = format!(
            "no agent was found: name one of {}, or all",
            names.join(", ")
        );
        return Err(Failure::request(error, "not_found"));
    }
    Ok(chosen)
}

/// The skill: front matter, text, reference.
fn document(whole: clap::Command) -> String {
    let whole = catalog::built(whole);
    let version = whole.get_version().unwrap_or_default();
    let mut text = format!(
        "---\nname: {NAME}\ndescription: \"{DESCRIPTION}\"\nuser-invocable: true\nmetadata:\n{MARK}{version}\n---\n{BODY}"
    );
    text.push_str("| Command | What it does | Flags |\n|---|---|---|\n");
    for path in REFERENCE {
        let Some(command) = catalog::command_json(&whole, path) else {
            continue;
        };
        let flags: Vec<String> = command
            .flag_names()
            .map(|name| format!("`{name}`"))
            .collect();
        let _ = writeln!(
            text,
            "| `k8e {}` | {} | {} |",
            path.join(" "),
            command.usage(),
            flags.join(" ")
        );
    }
    text
}

fn installed(path: &Path, document: &[u8]) -> io::Result<Installed> {
    // The directory of the skill must be one: through a link of a project, files elsewhere would be replaced.
    if let Some(dir) = path.parent()
        && dir.is_symlink()
    {
        let error = format!("{} is a symbolic link", dir.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, error));
    }
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Installed::Absent),
        Err(error) => return Err(error),
    };
    let length = file.metadata()?.len();
    let mut file = file.take(HEAD_BYTES_MAX.max(document.len() as u64));
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    let head = String::from_utf8_lossy(&text);
    let front = head
        .strip_prefix("---")
        .and_then(|rest| rest.split("\n---").next());
    if !front.is_some_and(|front| front.lines().any(|line| line.starts_with(MARK))) {
        return Ok(Installed::Foreign);
    }
    let same = length == document.len() as u64 && text == document;
    Ok(Installed::Ours { same })
}

/// Writes the file beside its place and renames it, so that no agent reads half of it.
fn replace(path: &Path, document: &[u8]) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir)?;
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        builder.permissions(std::fs::Permissions::from_mode(0o644));
    }
    let mut file = builder.prefix(".k8e-").tempfile_in(dir)?;
    file.write_all(document)?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

// === impl Agent ===

impl Agent {
    const fn new(
        name: &'static str,
        kind: AgentArg,
        dir_env: Option<&'static str>,
        dir: &'static str,
        user_skills: &'static str,
    ) -> Self {
        Self {
            name,
            kind,
            dir_env,
            dir,
            user_skills,
        }
    }

    /// The agent's own directory.
    fn dir(&self, place: &PlaceArgs) -> Result<PathBuf, Failure> {
        if let Some(project) = &place.project {
            return Ok(project.join(self.dir));
        }
        let named = self.dir_env.and_then(std::env::var_os);
        if let Some(named) = named.filter(|dir| !dir.is_empty()) {
            return Ok(named.into());
        }
        let home = std::env::home_dir().filter(|home| !home.as_os_str().is_empty());
        let home = home.ok_or_else(|| {
            let error = "the home directory is not known: set HOME, or use --project=DIR";
            Failure::request(error, "invalid")
        })?;
        Ok(home.join(self.dir))
    }

    fn skills(&self, dir: &Path, place: &PlaceArgs) -> PathBuf {
        match place.project {
            Some(_) => dir.join("skills"),
            None => dir.join(self.user_skills),
        }
    }
}

// === impl SkillJson ===

impl SkillJson {
    fn new(agent: &Agent, path: &Path, status: &'static str) -> Self {
        Self {
            agent: agent.name,
            path: path.display().to_string(),
            status,
        }
    }
}

#[cfg(test)]
mod tests;
