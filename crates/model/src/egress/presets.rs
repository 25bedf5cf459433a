//! Lists of hosts that people can name: `@python` and the like.
//!
//! They are data, in `presets.txt`: what changes there is a fact about the world, not about k8e.

use super::shown;
use crate::Error;

const TEXT: &str = include_str!("presets.txt");

/// Presets that name presets that name presets: more than the file has, and an end if it should
/// ever name itself.
const DEPTH_MAX: usize = 4;

/// The names of all presets, in the order of the file.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    sections().map(|(name, _)| name)
}

/// The entries of the preset `@…`, in order, with the presets it names in their places.
pub(super) fn expand(name: &str) -> Result<Vec<&'static str>, Error> {
    let mut entries = Vec::new();
    expand_into(name, DEPTH_MAX, &mut entries)?;
    Ok(entries)
}

fn expand_into(name: &str, depth: usize, entries: &mut Vec<&'static str>) -> Result<(), Error> {
    let found = sections().find(|(section, _)| *section == name);
    let Some((_, lines)) = found.filter(|_| depth > 0) else {
        let known = preset_names().collect::<Vec<_>>().join(", ");
        return Err(Error::invalid(format!(
            "preset {:?} is not known: there are {known}",
            shown(name)
        )));
    };
    for line in lines {
        match line.starts_with('@') {
            true => expand_into(line, depth - 1, entries)?,
            false => entries.push(line),
        }
    }
    Ok(())
}

/// A section is a preset's name and the lines up to the next blank one.
fn sections() -> impl Iterator<Item = (&'static str, Vec<&'static str>)> {
    TEXT.split("\n\n").filter_map(|block| {
        let mut lines = block
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'));
        lines.next().map(|name| (name, lines.collect()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::egress::{EgressPolicy, HostName, Rule};

    #[test]
    fn the_file_has_what_the_documentation_names() {
        let names: Vec<&str> = preset_names().collect();
        let known = ["@python", "@npm", "@github", "@read-only", "@default"];
        assert_eq!(names, known);
    }

    #[test]
    fn read_only_has_no_host_that_takes_something_in() {
        let policy = EgressPolicy::parse(&["@read-only"]).unwrap();
        for host in [
            "github.com",
            "api.github.com",
            "uploads.github.com",
            "gist.github.com",
            "registry.npmjs.org",
            "upload.pypi.org",
            "crates.io",
            "proxy.golang.org",
            "sum.golang.org",
        ] {
            let name = HostName::parse(host).unwrap();
            assert!(!policy.allows_name(&name), "{host}");
        }
        // Each by its own name: what is below a name is somebody else's to add to.
        let entries = policy.entries();
        assert!(entries.iter().all(|entry| !entry.contains('*')));
    }

    #[test]
    fn every_entry_is_a_rule_in_its_one_spelling() {
        for name in preset_names() {
            let entries = expand(name).unwrap();
            assert!(!entries.is_empty(), "{name}");
            for entry in entries {
                assert_eq!(entry.parse::<Rule>().unwrap().to_string(), entry);
            }
        }
    }

    #[test]
    fn the_default_has_the_others() {
        let default = EgressPolicy::parse(&["@default"]).unwrap().entries();
        for name in ["@python", "@npm"] {
            for entry in expand(name).unwrap() {
                assert!(default.iter().any(|have| have == entry), "{name}: {entry}");
            }
        }
        let github = expand("@github").unwrap();
        let common = github
            .iter()
            .filter(|host| default.contains(&(**host).to_owned()));
        assert_eq!(common.count(), 2);
    }

    #[test]
    fn an_unknown_preset_lists_those_there_are() {
        for bad in ["@", "@nope", "@python:443", "@Python"] {
            let message = expand(bad).unwrap_err().message;
            assert!(message.contains("@python") && message.contains("@default"));
        }
    }
}
