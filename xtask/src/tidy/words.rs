//! Plain words: idioms of this project's own that a reader has to ask about, and what to write
//! instead. Checked in Markdown and in the comments and strings of Rust.
//!
//! Words are compared, not characters: a phrase is found across line breaks and whatever its case.

use super::prose::{self, Word};
use std::path::Path;

/// The idiom and the term for it. Only what never means anything else: a word that is also a good
/// one (`again`, `place`) is for the reviewer to see.
const IDIOMS: &[(&str, &str)] = &[
    (
        "nobody asking",
        "background tasks: TTL expiry, idle stop, crash recovery",
    ),
    (
        "room for who",
        "connection limit for unauthenticated clients",
    ),
    (
        "how often one may call",
        "per-principal rate limiter (token bucket)",
    ),
    (
        "how often one principal may call",
        "per-principal rate limiter (token bucket)",
    ),
    ("who is asking", "authentication"),
    ("whether he may", "authentication and rate limiting"),
    (
        "the door for those who watch",
        "admin HTTP server: metrics, health and readiness probes",
    ),
    (
        "side door",
        "admin HTTP server: metrics, health and readiness probes",
    ),
    (
        "keys that wait for a pass",
        "deduplicating work queue with back-off",
    ),
    ("writes that may wait", "debouncer: coalesces writes"),
    ("walking pace", "throttled refill"),
    ("behind the backs", "in the background"),
    (
        "that does not say",
        "the default (when the request sets none)",
    ),
    (
        "who does not say",
        "the default (when the request sets none)",
    ),
    (
        "came through no door",
        "unauthenticated: no credentials on this connection",
    ),
    ("everything is known", "initial cache sync complete"),
    ("what bytes ride in", "relay buffer (splice pipe or heap)"),
    ("goes on saying nothing", "too many empty replies"),
    ("the kernel of one's own", "a separate (user-space) kernel"),
    ("a kernel of one's own", "a separate (user-space) kernel"),
    ("K8E's API", "the `sandbox.v1` API"),
    ("K8E's clients", "`sandbox.v1` clients"),
    ("patience", "deadline or timeout"),
    ("unsaid", "the noun of the thing: not set, not reported"),
    ("he", "the client, the program, it"),
    ("his", "the client's, its"),
    ("himself", "itself"),
];

/// The table itself names every idiom.
const TABLE: &str = "xtask/src/tidy/words.rs";

/// Every idiom in one Rust file.
pub(super) fn check_rust(path: &Path, text: &str) -> Vec<String> {
    if path.ends_with(TABLE) {
        return Vec::new();
    }
    check(path, &prose::of_rust(text))
}

/// Every idiom in one Markdown file.
pub(super) fn check_markdown(path: &Path, text: &str) -> Vec<String> {
    check(path, &prose::of_markdown(text))
}

fn check(path: &Path, words: &[Word]) -> Vec<String> {
    let mut violations = Vec::new();
    for (idiom, instead) in IDIOMS {
        let idiom_words: Vec<Word> = prose::words(1, idiom);
        let found = words.windows(idiom_words.len()).filter(|found| {
            let pairs = found.iter().zip(&idiom_words);
            pairs
                .into_iter()
                .all(|(found, want)| found.text == want.text)
        });
        violations.extend(found.map(|found| {
            let (file, line) = (path.display(), found[0].line);
            format!("{file}:{line}: \"{idiom}\": write \"{instead}\" (xtask/src/tidy/words.rs)")
        }));
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::{check_markdown, check_rust};
    use std::path::Path;

    fn rust(text: &str) -> Vec<String> {
        check_rust(Path::new("a.rs"), text)
    }

    #[test]
    fn an_idiom_is_found_in_comments_and_strings_and_says_what_to_write() {
        for text in [
            "/// What happens with nobody asking.\n",
            "let help = \"with nobody asking\";\n",
            "// Runs with nobody\n// asking at all.\n",
            "/* Nobody asking */\n",
        ] {
            let found = rust(text);
            assert_eq!(found.len(), 1, "{text}");
            assert!(found[0].contains("background tasks"), "{found:?}");
        }
        assert_eq!(
            check_markdown(Path::new("a.md"), "x\nWalking\npace.\n").len(),
            1
        );
    }

    #[test]
    fn its_line_is_named() {
        let found = check_markdown(Path::new("a.md"), "one\n\nat walking pace\n");
        assert!(found[0].starts_with("a.md:3: "), "{found:?}");
    }

    #[test]
    fn names_in_code_and_longer_words_are_left_alone() {
        assert!(rust("let patience = he(his);\n").is_empty());
        assert!(rust("// the head of this\n").is_empty());
        assert!(rust("// the API of K8E\n").is_empty());
    }
}
