//! What one source file must look like.

use std::path::Path;

/// A longer file has more than one subject.
const FILE_LINES_MAX: usize = 700;

/// Left in a comment by somebody who meant to come back.
const MARKERS: &[&str] = &["TODO", "FIXME", "XXX"];

/// What follows the keyword where it opens something; this way the word itself may be written.
const UNSAFE_OPENS: &[&str] = &["{", "fn", "impl", "extern", "trait"];

/// What a code block in a doc comment begins with when it is not compiled.
const TEXT_BLOCK: &str = "```text";

/// Every violation in one file.
pub(super) fn check(path: &Path, text: &str) -> Vec<String> {
    let file = path.display();
    let mut violations = Vec::new();
    if path.ends_with("mod.rs") {
        violations.push(format!(
            "{file}: no mod.rs: name the file after its folder, beside it"
        ));
    }
    if !starts_with_module_doc(text) {
        violations.push(format!(
            "{file}:1: begin with `//!` that says why this module exists"
        ));
    }
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX && !is_test(path) {
        violations.push(format!(
            "{file}: {lines} lines, at most {FILE_LINES_MAX}: split it"
        ));
    }
    if let Some(number) = compiled_example(text) {
        violations.push(format!(
            "{file}:{number}: CI runs no doctests: put the example into examples/, or begin the \
             block with {TEXT_BLOCK}"
        ));
    }
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let (code, comment) = line.split_once("//").unwrap_or((line, ""));
        if !path.ends_with("sys.rs") && opens_unsafe(code) {
            violations.push(format!(
                "{file}:{number}: unsafe code lives in a file named sys.rs behind a safe function"
            ));
        }
        if let Some(marker) = marker_without_issue(comment) {
            violations.push(format!(
                "{file}:{number}: {marker} without an issue: open one and write its #number here"
            ));
        }
    }
    violations
}

/// Inner attributes may come first: `sys.rs` files begin by expecting unsafe code.
fn starts_with_module_doc(text: &str) -> bool {
    let mut in_attribute = false;
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if in_attribute || line.starts_with("#![") {
            in_attribute = !line.ends_with(']');
            continue;
        }
        return line.starts_with("//!");
    }
    false
}

/// The line of the first code block in a doc comment that rustdoc would compile as a test.
fn compiled_example(text: &str) -> Option<usize> {
    let mut is_open = false;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start();
        let doc = line.strip_prefix("//!").or(line.strip_prefix("///"));
        let Some(doc) = doc else {
            is_open = false;
            continue;
        };
        let doc = doc.trim();
        if !doc.starts_with("```") {
            continue;
        }
        if !is_open && doc != TEXT_BLOCK {
            return Some(index + 1);
        }
        is_open = !is_open;
    }
    None
}

fn is_test(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "tests") || path.ends_with("tests.rs")
}

fn opens_unsafe(code: &str) -> bool {
    let words: Vec<&str> = code.split_whitespace().collect();
    let block = words.windows(2).any(|pair| {
        let opens = UNSAFE_OPENS.iter().any(|open| pair[1].starts_with(open));
        pair[0].trim_start_matches(|c: char| !c.is_alphanumeric()) == "unsafe" && opens
    });
    block || code.trim_start().starts_with("#[unsafe(")
}

fn marker_without_issue(comment: &str) -> Option<&'static str> {
    let numbered = comment
        .split('#')
        .skip(1)
        .any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    if numbered {
        return None;
    }
    let mut words = comment.split(|c: char| !c.is_alphanumeric());
    words.find_map(|word| MARKERS.iter().copied().find(|marker| *marker == word))
}

#[cfg(test)]
mod tests {
    use super::{FILE_LINES_MAX, check};
    use std::path::Path;

    fn violations(path: &str, text: &str) -> usize {
        check(Path::new(path), text).len()
    }

    fn body(line: &str) -> String {
        format!("//! Why.\n{line}\n")
    }

    #[test]
    fn a_module_says_why_it_exists() {
        assert_eq!(violations("a.rs", "//! Why.\n"), 0);
        assert_eq!(
            violations("sys.rs", "#![expect(\n    unsafe_code,\n)]\n//! Why.\n"),
            0
        );
        assert_eq!(violations("a.rs", "use std::fs;\n"), 1);
        assert_eq!(violations("a.rs", ""), 1);
    }

    #[test]
    fn unsafe_lives_in_sys() {
        let opened = ["unsafe", "{ call() }"].join(" ");
        assert_eq!(violations("a.rs", &body(&opened)), 1);
        assert_eq!(
            violations("a.rs", &body(&format!("let x = ({opened});"))),
            1
        );
        assert_eq!(violations("sys.rs", &body(&opened)), 0);
        assert_eq!(violations("a.rs", &body("// unsafe fn in a comment")), 0);
        assert_eq!(violations("a.rs", &body("#![forbid(unsafe_code)]")), 0);
    }

    #[test]
    fn what_is_left_to_do_has_an_issue() {
        let left = ["TO", "DO"].concat();
        assert_eq!(violations("a.rs", &body(&format!("// {left}: later"))), 1);
        assert_eq!(
            violations("a.rs", &body(&format!("// {left}(#12): later"))),
            0
        );
        assert_eq!(violations("a.rs", &body("// XXXX is not a marker")), 0);
    }

    #[test]
    fn examples_are_not_hidden_in_doc_comments() {
        assert_eq!(violations("a.rs", &body("//! ```text\n//! a\n//! ```")), 0);
        assert_eq!(violations("a.rs", &body("/// ```\n/// a();\n/// ```")), 1);
        let two = "/// ```text\n/// a\n/// ```\n/// ```no_run\n/// b\n/// ```";
        assert_eq!(violations("a.rs", &body(two)), 1);
    }

    #[test]
    fn files_are_short_and_none_is_a_mod() {
        let long = body(&"\n".repeat(FILE_LINES_MAX));
        assert_eq!(violations("crates/a/src/a.rs", &long), 1);
        assert_eq!(violations("crates/a/tests/a.rs", &long), 0);
        assert_eq!(violations("a/mod.rs", "//! Why.\n"), 1);
    }
}
