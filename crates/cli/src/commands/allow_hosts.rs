//! `k8e sandbox allow-hosts`: shows or changes the egress allow-list of a live session.

use super::hosts;
use crate::failure::Failure;
use crate::output;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use k8e_model::{EgressPolicy, Error, Rule};
use serde::Serialize;

/// First paragraphs of `k8e sandbox allow-hosts --help`.
pub(super) const LONG_ABOUT: &str = "\
Change the egress allow-list of a live session. Connections to hosts that are no longer allowed are cut.

A list replaces the current one; --add and --remove edit it. Without either the list is printed.
When several are given the first of these wins: --clear, --hosts, hosts as arguments, --add and --remove.";

/// Arguments of `k8e sandbox allow-hosts`.
#[derive(Args, Debug, Default)]
#[command(after_long_help = concat!("\
Examples:
  k8e sandbox allow-hosts --session-id $SID @python,api.example.com
  k8e sandbox allow-hosts --session-id $SID --add '*.example.com,db.example.com:5432'
  k8e sandbox allow-hosts --session-id $SID --remove api.example.com
  k8e sandbox allow-hosts --session-id $SID --clear

", hosts::help!()))]
pub struct AllowHostsArgs {
    /// The new list; replaces the current one
    #[arg(value_name = "HOSTS", value_delimiter = ',')]
    positional: Vec<String>,

    /// The new list, as a flag
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    hosts: Vec<String>,

    /// Entries to add to the list; may be repeated
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    add: Vec<String>,

    /// Entries to remove from the list; may be repeated
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    remove: Vec<String>,

    /// Empty the list: deny all egress
    #[arg(long)]
    clear: bool,

    /// Id of the session
    #[arg(long, env = "K8E_SANDBOX_SESSION_ID", value_name = "ID")]
    session_id: Option<String>,
}

/// The validated request.
#[derive(Debug)]
pub(crate) struct Request {
    session_id: String,
    change: Change,
}

#[derive(Debug, PartialEq, Eq)]
enum Change {
    Show,
    Set(Vec<String>),
    Edit { add: Vec<Rule>, remove: Vec<Rule> },
}

/// JSON output, with the keys of the Go K8E.
#[derive(Serialize)]
struct AllowedJson {
    session_id: String,
    allowed_hosts: Vec<String>,
}

// === impl AllowHostsArgs ===

impl AllowHostsArgs {
    pub(crate) fn request(self) -> Result<Request, Failure> {
        let session_id = self.session_id.clone().unwrap_or_default();
        if session_id.is_empty() {
            return Err(Failure::request(
                "no session is named: set --session-id or K8E_SANDBOX_SESSION_ID",
                "invalid",
            ));
        }
        let change = self.change()?;
        Ok(Request { session_id, change })
    }

    fn change(self) -> Result<Change, Failure> {
        let list = [self.hosts, self.positional]
            .into_iter()
            .find(|list| !list.is_empty());
        match list {
            _ if self.clear => Ok(Change::Set(Vec::new())),
            Some(list) => {
                hosts::check(&list)?;
                Ok(Change::Set(list))
            }
            None if self.add.is_empty() && self.remove.is_empty() => Ok(Change::Show),
            None => Ok(Change::Edit {
                add: rules("--add", &self.add)?,
                remove: rules("--remove", &self.remove)?,
            }),
        }
    }
}

pub(crate) async fn run(request: Request, mut client: Client) -> Result<u8, Failure> {
    let Request { session_id, change } = request;
    let hosts = match change {
        Change::Show => {
            let shown = current(&mut client, &session_id).await?;
            return print(session_id, shown);
        }
        Change::Set(hosts) => hosts,
        Change::Edit { add, remove } => {
            edited(&current(&mut client, &session_id).await?, add, &remove)?
        }
    };
    let request = v1::UpdateAllowedHostsRequest {
        session_id: session_id.clone(),
        hosts,
    };
    let now = client.update_allowed_hosts(request).await?.into_inner();
    print(session_id, now.hosts)
}

fn print(session_id: String, allowed_hosts: Vec<String>) -> Result<u8, Failure> {
    let json = AllowedJson {
        session_id,
        allowed_hosts,
    };
    output::json(&json).map(|()| 0)
}

async fn current(client: &mut Client, session_id: &str) -> Result<Vec<String>, Failure> {
    let request = v1::GetSessionRequest {
        session_id: session_id.to_owned(),
    };
    let session = client.get_session(request).await?.into_inner();
    Ok(session.allowed_hosts)
}

/// Parses the rules of --add or --remove; empty when the flag is not set.
fn rules(flag: &str, entries: &[String]) -> Result<Vec<Rule>, Failure> {
    if entries.is_empty() {
        return Ok(Vec::new());
    }
    match EgressPolicy::parse(entries)? {
        EgressPolicy::Only(rules) => Ok(rules),
        EgressPolicy::None | EgressPolicy::All => Err(Failure::request(
            format!("{flag} takes hosts: write `none` or `all` without a flag"),
            "invalid",
        )),
    }
}

/// The list after adding and removing rules; removing one that is not in it is not an error.
fn edited(current: &[String], add: Vec<Rule>, remove: &[Rule]) -> Result<Vec<String>, Error> {
    let now = if current.is_empty() {
        EgressPolicy::None
    } else {
        EgressPolicy::parse(current)?
    };
    let mut rules = match now {
        EgressPolicy::None => Vec::new(),
        EgressPolicy::Only(rules) => rules,
        EgressPolicy::All => {
            return Err(Error::invalid(
                "the list of the session is `all`, which cannot be edited: give the whole list, without --add and --remove",
            ));
        }
    };
    rules.extend(add);
    rules.retain(|rule| !remove.contains(rule));
    // Parsed once more, to drop duplicates and to check the number of rules.
    let entries: Vec<String> = rules.iter().map(Rule::to_string).collect();
    if entries.is_empty() {
        return Ok(entries);
    }
    Ok(EgressPolicy::parse(&entries)?.entries())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: AllowHostsArgs,
    }

    fn change(line: &str) -> Result<Change, Failure> {
        let words = ["allow-hosts"].into_iter().chain(line.split_whitespace());
        Line::try_parse_from(words).unwrap().args.change()
    }

    fn set(hosts: &[&str]) -> Change {
        Change::Set(strings(hosts))
    }

    fn strings(hosts: &[&str]) -> Vec<String> {
        hosts.iter().map(|host| (*host).to_owned()).collect()
    }

    fn parsed(entries: &[&str]) -> Vec<Rule> {
        entries.iter().map(|entry| entry.parse().unwrap()).collect()
    }

    #[test]
    fn clear_comes_before_hosts_and_hosts_before_edits() {
        let check = |line: &str, want: Change| assert_eq!(change(line).unwrap(), want, "{line}");
        check(
            "--clear --hosts a.example b.example --add c.example",
            set(&[]),
        );
        check(
            "--hosts a.example b.example --add c.example",
            set(&["a.example"]),
        );
        check(
            "b.example,c.example --add d.example",
            set(&["b.example", "c.example"]),
        );
        check("b.example c.example", set(&["b.example", "c.example"]));
        check("none", set(&["none"]));
        check("@python,a.example:22", set(&["@python", "a.example:22"]));
        check("", Change::Show);
        let edit = Change::Edit {
            add: parsed(&["a.example", "b.example"]),
            remove: parsed(&["c.example"]),
        };
        check("--add a.example,b.example --remove C.example", edit);
    }

    #[test]
    fn nonsense_is_refused_before_anything_is_sent() {
        for bad in [
            "https://a.example",
            "none,a.example",
            "--add none",
            "--remove all",
            "--add a..b",
            "--hosts @nobody",
        ] {
            assert_eq!(change(bad).unwrap_err().exit(), 1, "{bad}");
        }
        let nobody = AllowHostsArgs {
            session_id: Some(String::new()),
            ..AllowHostsArgs::default()
        };
        assert!(nobody.request().is_err());
    }

    #[test]
    fn lists_are_edited() {
        let check = |current: &[&str], add: &[&str], remove: &[&str], want: &[&str]| {
            let edited = edited(&strings(current), parsed(add), &parsed(remove));
            assert_eq!(edited.unwrap(), want);
        };
        check(&["none"], &["a.example"], &[], &["a.example"]);
        check(&[], &["a.example"], &[], &["a.example"]);
        check(
            &["a.example"],
            &["a.example", "b.example"],
            &[],
            &["a.example", "b.example"],
        );
        check(
            &["a.example", "b.example"],
            &[],
            &["a.example", "x.example"],
            &["b.example"],
        );
        check(&["a.example"], &[], &["a.example"], &[]);
        check(&["a.example:22"], &[], &["a.example"], &["a.example:22"]);
        check(
            &["a.example"],
            &["b.example"],
            &["b.example"],
            &["a.example"],
        );
        assert!(edited(&strings(&["all"]), parsed(&["a.example"]), &[]).is_err());
    }
}
