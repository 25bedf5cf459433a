//! The words that people read: those of Markdown, and of the comments and strings of Rust.

/// One word and the line it is on, from 1.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) line: usize,
    /// In lower case, without punctuation around it.
    pub(super) text: String,
}

/// What a Rust lexer is in the middle of.
#[derive(Clone, Copy)]
enum Within {
    Code,
    LineComment,
    /// With the depth of its nesting.
    BlockComment(usize),
    String,
    /// With the number of `#` that close it.
    RawString(usize),
}

/// The words of a line that begins at `line`.
pub(super) fn words(line: usize, text: &str) -> Vec<Word> {
    let numbered = text.lines().enumerate();
    numbered
        .flat_map(|(index, text)| {
            let parts = text.split(|c: char| !(c.is_alphanumeric() || c == '\'' || c == '_'));
            parts.map(move |part| (line + index, part.trim_matches('\'')))
        })
        .filter(|(_, part)| !part.is_empty())
        .map(|(line, part)| Word {
            line,
            text: part.to_lowercase(),
        })
        .collect()
}

/// The words of Markdown outside code blocks.
pub(super) fn of_markdown(text: &str) -> Vec<Word> {
    let mut is_code = false;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            found.extend(words(index + 1, line));
        }
    }
    found
}

/// The words in comments and strings of Rust.
pub(super) fn of_rust(text: &str) -> Vec<Word> {
    words(1, &blank_code(text))
}

/// The same text with blanks instead of code: lines and columns stay what they are.
fn blank_code(text: &str) -> String {
    let mut blanked = String::with_capacity(text.len());
    let mut within = Within::Code;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let (next, length) = step(within, rest, c);
        let is_prose = !matches!((within, next), (Within::Code, _) | (_, Within::Code));
        for c in rest[..length].chars() {
            let keep = is_prose || c == '\n';
            blanked.push(if keep { c } else { ' ' });
        }
        within = next;
        rest = &rest[length..];
    }
    blanked
}

/// What comes after the beginning of `rest`, and how many bytes that beginning is.
fn step(within: Within, rest: &str, c: char) -> (Within, usize) {
    match within {
        Within::Code => step_code(rest, c),
        Within::LineComment if c == '\n' => (Within::Code, 1),
        Within::BlockComment(depth) if rest.starts_with("*/") => match depth {
            0 => (Within::Code, 2),
            _ => (Within::BlockComment(depth - 1), 2),
        },
        Within::BlockComment(depth) if rest.starts_with("/*") => {
            (Within::BlockComment(depth + 1), 2)
        }
        Within::String if c == '"' => (Within::Code, 1),
        // A line break or a quote that is escaped is no more than a blank between words.
        Within::String if c == '\\' => {
            let escaped = rest[1..].chars().next().map_or(0, char::len_utf8);
            (Within::String, 1 + escaped)
        }
        Within::RawString(hashes) if c == '"' && opens_with_hashes(&rest[1..], hashes) => {
            (Within::Code, 1 + hashes)
        }
        Within::LineComment | Within::BlockComment(_) | Within::String | Within::RawString(_) => {
            (within, c.len_utf8())
        }
    }
}

fn step_code(rest: &str, c: char) -> (Within, usize) {
    if rest.starts_with("//") {
        return (Within::LineComment, 2);
    }
    if rest.starts_with("/*") {
        return (Within::BlockComment(0), 2);
    }
    if c == '"' {
        return (Within::String, 1);
    }
    if let Some(length) = char_literal(rest) {
        return (Within::Code, length);
    }
    if c == 'r' {
        let hashes = rest[1..].bytes().take_while(|byte| *byte == b'#').count();
        if rest[1 + hashes..].starts_with('"') {
            return (Within::RawString(hashes), 2 + hashes);
        }
    }
    // A whole name at once, so that the `r` at the end of one does not begin a raw string.
    let name = rest
        .find(|c: char| !(c.is_alphanumeric() || c == '_'))
        .unwrap_or(rest.len());
    let is_raw_bytes = rest.starts_with("br\"") || rest.starts_with("br#");
    let length = if is_raw_bytes { 1 } else { name };
    (Within::Code, length.max(c.len_utf8()))
}

/// The length of a literal like `'"'` or `'\''`; none for a lifetime.
fn char_literal(rest: &str) -> Option<usize> {
    let inner = rest.strip_prefix('\'')?;
    let length = if inner.starts_with('\\') {
        2 + inner.get(2..)?.find('\'')?
    } else {
        inner.chars().next()?.len_utf8()
    };
    inner[length..].starts_with('\'').then_some(length + 2)
}

fn opens_with_hashes(rest: &str, hashes: usize) -> bool {
    rest.bytes().take_while(|byte| *byte == b'#').count() >= hashes
}

#[cfg(test)]
mod tests {
    use super::{of_markdown, of_rust, words};

    fn texts(text: &str) -> Vec<String> {
        of_rust(text).into_iter().map(|word| word.text).collect()
    }

    #[test]
    fn comments_and_strings_are_read_and_code_is_not() {
        assert_eq!(texts("let a = b; // One two\nlet c = d;"), ["one", "two"]);
        assert_eq!(texts("f(\"in it\", x)"), ["in", "it"]);
        assert_eq!(texts("f(\"a \\\" b\", x)"), ["a", "b"]);
        assert_eq!(texts("f(r#\"a \" b\"#, x)"), ["a", "b"]);
        assert_eq!(texts("f(br\"raw\", x)"), ["raw"]);
        assert_eq!(texts("/* a /* b */ c */ d"), ["a", "b", "c"]);
        assert_eq!(texts("let q = '\"'; let w = '\\''; x // y"), ["y"]);
        assert_eq!(texts("fn f<'a>(x: &'a str) {} // z"), ["z"]);
        assert_eq!(texts("for x in y { r(\"s\") }"), ["s"]);
        assert!(texts("plain(code)").is_empty());
        assert!(texts("'\\").is_empty());
    }

    #[test]
    fn code_blocks_of_markdown_are_not_prose() {
        let found = of_markdown("one `two`\n```\nthree\n```\nfour's\n");
        let lines: Vec<_> = found
            .iter()
            .map(|word| (word.line, word.text.as_str()))
            .collect();
        assert_eq!(lines, [(1, "one"), (1, "two"), (5, "four's")]);
        assert_eq!(words(7, "a\nb")[1].line, 8);
    }
}
