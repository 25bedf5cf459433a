//! Splits a command line into words as Python's `shlex.split` does, which is what clients of this API
//! expect: quotes and backslashes as in a shell, and nothing else of a shell.

/// Why a line cannot be split.
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
    // None between words: '' is a word too.
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

/// The rest of a part in double quotes, in which a backslash escapes only those and itself.
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
    fn words_are_those_of_a_shell_without_a_shell() {
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
    fn what_is_not_closed_is_an_error() {
        for line in ["'a", "\"a", "a \"b\\\""] {
            assert_eq!(split(line), Err(SplitError::Quotation), "{line}");
        }
        for line in ["a\\", "\"a\\"] {
            assert_eq!(split(line), Err(SplitError::Escape), "{line}");
        }
    }
}
