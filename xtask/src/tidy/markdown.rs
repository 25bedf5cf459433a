//! What Markdown must look like: lines that fit beside a diff.

use std::path::Path;

/// The longest line. Rows of tables and code blocks cannot be broken and may be longer, and so may
/// a line that would fit without the target of a link in it.
const LINE_COLUMNS_MAX: usize = 120;

/// Every line of one file that is too long.
pub(super) fn check(path: &Path, text: &str) -> Vec<String> {
    let file = path.display();
    let mut is_code = false;
    let mut violations = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        if trimmed.starts_with("```") {
            is_code = !is_code;
            continue;
        }
        let columns = line.chars().count();
        if is_code || trimmed.starts_with('|') || columns <= LINE_COLUMNS_MAX {
            continue;
        }
        if columns - longest_link(line) > LINE_COLUMNS_MAX {
            let number = index + 1;
            violations.push(format!(
                "{file}:{number}: {columns} columns, at most {LINE_COLUMNS_MAX}: break the line"
            ));
        }
    }
    violations
}

/// The columns of the longest link target or bare URL.
fn longest_link(line: &str) -> usize {
    let targets = line.split("](").skip(1);
    let targets = targets.filter_map(|rest| rest.split(')').next());
    let urls = line.split(|c: char| c.is_whitespace() || "()<>".contains(c));
    let urls = urls.filter(|word| word.contains("://"));
    let all = targets.chain(urls);
    all.map(|target| target.chars().count()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{LINE_COLUMNS_MAX, check};
    use std::path::Path;

    fn violations(text: &str) -> usize {
        check(Path::new("a.md"), text).len()
    }

    #[test]
    fn a_line_fits() {
        let longest = "ä".repeat(LINE_COLUMNS_MAX);
        assert_eq!(violations(&longest), 0);
        assert_eq!(violations(&format!("{longest} x")), 1);
    }

    #[test]
    fn what_cannot_be_broken_may_be_longer() {
        let long = "x ".repeat(LINE_COLUMNS_MAX);
        assert_eq!(violations(&format!("| {long} |")), 0);
        assert_eq!(violations(&format!("```\n{long}\n```\n{long}")), 1);
        let url = format!("https://example.org/{}", "x".repeat(LINE_COLUMNS_MAX));
        assert_eq!(violations(&format!("see {url}")), 0);
        assert_eq!(violations(&format!("see [this]({url}) and more")), 0);
        assert_eq!(violations(&format!("[this]({url}) {long}")), 1);
    }
}
