//! What a commit message must look like (CONTRIBUTING.md, "Commits"), for commits that came after
//! the rule did.

use super::report::Report;
use crate::{Outcome, process};
use std::process::Command;

/// The last commit that the rule does not hold for.
const RULE_SINCE: &str = "78e4ed151db42a9099abfded7e15607f9d60ad69";

/// Longer subjects are cut by `git log --oneline` and by every web page that lists commits.
const SUBJECT_COLUMNS_MAX: usize = 72;

/// Between the fields of one commit, and between commits: git lets neither into a message.
const FIELD: char = '\0';
const FORMAT: &str = "--format=%h%x00%s%x00%b%x00";

/// Checks every commit since the rule, merges excepted. Without git, or in a clone that does not
/// reach back that far, says that they were not checked.
pub(super) fn check(report: &mut Report) -> Outcome {
    if !process::succeeds(git().args(["cat-file", "-e", &format!("{RULE_SINCE}^{{commit}}")])) {
        let since = &RULE_SINCE[..7];
        report.not_checked(format!(
            "commit messages: this clone does not have {since}; `git fetch --unshallow` gets it"
        ));
        return Ok(());
    }
    report.step("commits", || {
        let range = format!("{RULE_SINCE}..HEAD");
        let log = process::output(git().args(["log", "--no-merges", "-z", FORMAT, &range]))?;
        let violations = violations(&log);
        if violations.is_empty() {
            return Ok(());
        }
        Err(format!(
            "{}\nmend them with `git rebase --interactive`",
            violations.join("\n")
        ))
    })
}

fn git() -> Command {
    Command::new("git")
}

/// What is wrong with the commits of a log in [`FORMAT`].
fn violations(log: &str) -> Vec<String> {
    let fields: Vec<&str> = log.split(FIELD).collect();
    // With -z git puts one more zero byte between commits.
    let commits = fields.chunks(4).filter(|fields| fields.len() >= 3);
    commits
        .flat_map(|fields| {
            let (hash, subject, body) = (fields[0], fields[1], fields[2]);
            let wrong = wrong_with(subject, body);
            wrong
                .into_iter()
                .map(move |wrong| format!("{hash} {subject:?}: {wrong}"))
        })
        .collect()
}

fn wrong_with(subject: &str, body: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let columns = subject.chars().count();
    if columns > SUBJECT_COLUMNS_MAX {
        wrong.push(format!(
            "a subject of {columns} columns, at most {SUBJECT_COLUMNS_MAX}"
        ));
    }
    let mut words = subject.split(|c: char| !c.is_alphanumeric());
    if words.any(|word| word.eq_ignore_ascii_case("wip")) {
        wrong.push("not finished: squash it into the commit that is".to_owned());
    }
    if !body.lines().any(says_something) {
        wrong.push("no body: say why, and what was tried".to_owned());
    }
    wrong
}

/// Whether a line of a body is more than a trailer like `Signed-off-by: …`.
fn says_something(line: &str) -> bool {
    let is_trailer = line.split_once(": ").is_some_and(|(key, _)| {
        key.contains('-') && key.chars().all(|c| c.is_ascii_alphabetic() || c == '-')
    });
    !line.trim().is_empty() && !is_trailer
}

#[cfg(test)]
mod tests {
    use super::{SUBJECT_COLUMNS_MAX, violations, wrong_with};

    #[test]
    fn a_subject_fits_its_line_and_a_body_says_why() {
        let longest = "x".repeat(SUBJECT_COLUMNS_MAX);
        assert!(wrong_with(&longest, "Because.\n").is_empty());
        assert_eq!(wrong_with(&format!("{longest}x"), "Because.\n").len(), 1);
        assert_eq!(wrong_with("fix: it", "").len(), 1);
        assert_eq!(
            wrong_with("fix: it", "\nSigned-off-by: A <a@b.c>\n").len(),
            1
        );
        assert!(wrong_with("fix: it", "It broke: see above.\n").is_empty());
    }

    #[test]
    fn nothing_unfinished_lands() {
        assert_eq!(wrong_with("WIP: a door", "Why.").len(), 1);
        assert_eq!(wrong_with("feat: a door (wip)", "Why.").len(), 1);
        assert!(wrong_with("fix: wipe the disk", "Why.").is_empty());
    }

    #[test]
    fn each_commit_of_a_log_is_checked() {
        let log = "aaa\0fix: one\0Why.\n\0\0bbb\0fix: two\0\0\0ccc\0wip\0Why.\n\0";
        let wrong = violations(log);
        assert_eq!(wrong.len(), 2, "{wrong:?}");
        assert!(wrong[0].starts_with("bbb"), "{wrong:?}");
        assert!(wrong[1].starts_with("ccc"), "{wrong:?}");
        assert!(violations("").is_empty());
    }
}
