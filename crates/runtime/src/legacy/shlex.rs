//! Splits a command line into words exactly as Python's `shlex.split`, which the original server of this API uses:
//! quotes and backslashes as in a shell, and nothing else of a shell.
//!
//! Not the `shlex` crate: that one follows POSIX shells, where `#` begins a comment and a backslash in double quotes
//! escapes `$` and backticks, too. A command with a `#` would lose its end. It also does not say what is wrong.

/// Why a line cannot be split; the texts are Python's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SplitError {
    /// A quote was opened and not closed.
    #[error("no closing quotation")]
    Quotation,
    /// The line ends with a backslash.
    #[error("no escaped character")]
    Escape,
}

/// The words of a line.
pub(crate) fn split(line: &str) -> Result<Vec<String>, SplitError> {
    let mut words = Vec::new();
    // `None` between words. An empty quoted string is a word, too.
    let mut word: Option<String> = None;
    let mut chars = line.chars();
    while let Some(next) = chars.next() {
        match next {
            ' ' | '\t' | '\r' | '\n' => words.extend(word.take()),
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next().ok_or(SplitError::Quotation)? {
                        '\'' => break,
                        plain => word.push(plain),
                    }
                }
            }
            '"' => quoted(&mut chars, word.get_or_insert_default())?,
            '\\' => {
                let escaped = chars.next().ok_or(SplitError::Escape)?;
                word.get_or_insert_default().push(escaped);
            }
            plain => word.get_or_insert_default().push(plain),
        }
    }
    words.extend(word);
    Ok(words)
}

/// Reads up to the closing double quote. Inside, a backslash escapes only a double quote and a backslash.
fn quoted(chars: &mut std::str::Chars<'_>, word: &mut String) -> Result<(), SplitError> {
    loop {
        match chars.next().ok_or(SplitError::Quotation)? {
            '"' => return Ok(()),
            '\\' => match chars.next().ok_or(SplitError::Escape)? {
                escaped @ ('"' | '\\') => word.push(escaped),
                plain => word.extend(['\\', plain]),
            },
            plain => word.push(plain),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        split(line).unwrap()
    }

    #[test]
    fn lines_are_split_as_by_python_shlex() {
        assert_eq!(words(" echo  a\tb\n"), ["echo", "a", "b"]);
        assert_eq!(
            words("sh -c 'echo \"$HOME\" | wc'"),
            ["sh", "-c", "echo \"$HOME\" | wc"]
        );
        assert_eq!(words(r#"a"b c"'d e'f"#), ["ab cd ef"]);
        assert_eq!(words(r#""\"\\\n\$""#), [r#""\\n\$"#]);
        assert_eq!(words(r"a\ b \'c"), ["a b", "'c"]);
        assert_eq!(words("'' \"\""), ["", ""]);
        assert_eq!(words("a#b # c"), ["a#b", "#", "c"]);
        assert_eq!(words(""), Vec::<String>::new());
        assert_eq!(
            words("echo grüß € | cat"),
            ["echo", "grüß", "€", "|", "cat"]
        );
    }

    #[test]
    fn unclosed_quotes_and_trailing_backslashes_are_errors() {
        for line in ["'a", "\"a", "a \"b\\\""] {
            assert_eq!(split(line), Err(SplitError::Quotation), "{line}");
        }
        for line in ["a\\", "\"a\\"] {
            assert_eq!(split(line), Err(SplitError::Escape), "{line}");
        }
    }
}
