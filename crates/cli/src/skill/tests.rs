//! The skill shows nothing that the command line does not take.

use super::*;

/// Lines of the fenced blocks.
fn lines(document: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut is_code = false;
    for line in document.lines() {
        match line.starts_with("```") {
            true => is_code = !is_code,
            false if is_code => lines.push(line.to_owned()),
            false => {}
        }
    }
    lines
}

/// The words of the `k8e` command in a line: quotes are removed, the rest of a pipe is left out.
fn words(line: &str) -> Vec<String> {
    let at = line
        .find("k8e ")
        .unwrap_or_else(|| panic!("no command: {line}"));
    let (mut words, mut word, mut quoted) = (Vec::new(), String::new(), false);
    for char in line[at..].chars() {
        match char {
            '\'' => quoted = !quoted,
            '|' | '<' | '>' | ')' if !quoted => break,
            ' ' if !quoted => {
                words.extend(Some(std::mem::take(&mut word)).filter(|w| !w.is_empty()))
            }
            _ => word.push(char),
        }
    }
    words.extend(Some(word).filter(|word| !word.is_empty()));
    words
}

#[test]
fn every_command_line_of_the_skill_parses() {
    let document = document(crate::tests::whole());
    let lines = lines(&document);
    assert!(lines.len() > 20, "{lines:#?}");
    for line in lines {
        let words = words(&line);
        let parsed = crate::tests::whole().try_get_matches_from(&words);
        assert!(parsed.is_ok(), "{line}\n{words:?}\n{}", parsed.unwrap_err());
    }
}

#[test]
fn flags_and_commands_in_the_text_exist() {
    let whole = catalog::built(crate::tests::whole());
    let document = document(crate::tests::whole());
    let all = serde_json::to_string(&catalog::command_json(&whole, &["sandbox"]).unwrap()).unwrap();
    for quoted in BODY.split('`').skip(1).step_by(2) {
        if let Some(flag) = quoted.strip_prefix("--") {
            assert!(all.contains(&format!("{{\"name\":\"{flag}\"")), "{quoted}");
        }
        if quoted.starts_with("k8e ") {
            let parsed = crate::tests::whole().try_get_matches_from(quoted.split(' '));
            assert!(parsed.is_ok(), "{quoted}");
        }
    }
    for path in REFERENCE {
        assert!(catalog::command_json(&whole, path).is_some(), "{path:?}");
        assert!(document.contains(&format!("| `k8e {}` |", path.join(" "))));
    }
}

#[test]
fn the_front_matter_names_it_in_two_languages() {
    let document = document(crate::tests::whole());
    let front = document.split("---").nth(1).unwrap();
    assert!(
        front.starts_with("\nname: k8e-sandbox\ndescription: \""),
        "{front}"
    );
    // Agents refuse descriptions above this size.
    let description = front.lines().nth(2).unwrap();
    assert!(description.chars().count() <= 1024);
    assert!(description.contains("运行") && description.contains("execute"));
    assert!(!DESCRIPTION.contains('"'), "it is quoted");
}

#[test]
fn what_is_installed_is_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(NAME).join(FILE);
    let document = document(crate::tests::whole());
    let look = |document: &str| installed(&path, document.as_bytes()).unwrap();
    assert_eq!(look(&document), Installed::Absent);
    replace(&path, document.as_bytes()).unwrap();
    assert_eq!(look(&document), Installed::Ours { same: true });
    assert_eq!(look("another version"), Installed::Ours { same: false });
    std::fs::write(&path, format!("---\nname: x\n---\n{MARK}1")).unwrap();
    assert_eq!(look(&document), Installed::Foreign);
    // Nothing else is left beside it.
    assert_eq!(std::fs::read_dir(dir.path().join(NAME)).unwrap().count(), 1);
}
