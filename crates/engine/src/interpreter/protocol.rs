//! What the server and a kernel send each other. The kernel is a process of the sandbox: everything that it says is a
//! claim, has a bound, and is about its own execution only.
//!
//! Python and JavaScript kernels take and send JSON objects, one per line; their standard error is output. `bash` has no
//! kernel program: an interactive shell reads commands, and its standard output and error are output. Every execution
//! ends with its id: in a message or a mark on standard output, and in a mark on standard error.

use super::ExecutionEvent;
use crate::Error;
use bytes::Bytes;
use k8e_model::{Env, Language};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Longest message of a kernel: an image of several megabytes. Kernels leave out what does not fit.
pub(super) const MESSAGE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// MIME types of one result; objects with many have about ten.
const MIME_TYPES_MAX: usize = 32;

/// Longest MIME type; RFC 4288 allows 255.
const MIME_BYTES_MAX: usize = 255;

/// A message of a kernel. Flat, so that what is not known is skipped and not kept.
#[derive(Deserialize)]
struct Message {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: String,
    #[serde(default)]
    main: bool,
    #[serde(default)]
    data: Mimes,
    #[serde(default)]
    name: String,
    #[serde(default)]
    value: String,
    #[serde(default)]
    traceback: String,
    #[serde(default)]
    id: String,
}

#[derive(Default)]
struct Mimes(Vec<(String, String)>);

/// Decoder of a kernel's two streams.
pub(super) struct Streams {
    stdout: Stdout,
    stderr: Marked,
}

enum Stdout {
    Lines(Lines),
    Raw(Marked),
}

/// JSON lines.
#[derive(Default)]
struct Lines {
    partial: Vec<u8>,
    expected: String,
    ended: bool,
}

/// Output up to a mark.
#[derive(Default)]
struct Marked {
    mark: Vec<u8>,
    /// What may be the beginning of the mark.
    held: Vec<u8>,
    ended: bool,
}

/// A kernel that sent a message longer than [`MESSAGE_BYTES_MAX`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLong;

// === impl Streams ===

impl Streams {
    /// A kernel that starts: `ready` is the id of what it does first.
    pub(super) fn new(language: Language) -> Self {
        let stdout = match language {
            Language::Bash => Stdout::Raw(Marked::default()),
            Language::Python | Language::Node | Language::Ts => Stdout::Lines(Lines::default()),
        };
        let mut streams = Self {
            stdout,
            stderr: Marked::default(),
        };
        streams.begin("ready");
        streams
    }

    /// An execution with this id begins.
    pub(super) fn begin(&mut self, id: &str) {
        match &mut self.stdout {
            Stdout::Raw(marked) => marked.begin(id),
            Stdout::Lines(lines) => {
                lines.expected = id.to_owned();
                lines.ended = false;
            }
        }
        self.stderr.begin(id);
    }

    /// Whether the execution that began last has ended.
    pub(super) fn ended(&self) -> bool {
        let stdout = match &self.stdout {
            Stdout::Raw(marked) => marked.ended,
            Stdout::Lines(lines) => lines.ended,
        };
        stdout && self.stderr.ended
    }

    pub(super) fn stdout(&mut self, data: &[u8]) -> Result<Vec<ExecutionEvent>, TooLong> {
        match &mut self.stdout {
            Stdout::Lines(lines) => lines.feed(data),
            Stdout::Raw(marked) => {
                let output = marked.feed(data);
                let some = !output.is_empty();
                Ok(some
                    .then_some(ExecutionEvent::Stdout(output))
                    .into_iter()
                    .collect())
            }
        }
    }

    pub(super) fn stderr(&mut self, data: &[u8]) -> Option<ExecutionEvent> {
        let output = self.stderr.feed(data);
        (!output.is_empty()).then_some(ExecutionEvent::Stderr(output))
    }
}

// === impl Lines ===

impl Lines {
    fn feed(&mut self, mut data: &[u8]) -> Result<Vec<ExecutionEvent>, TooLong> {
        let mut events = Vec::new();
        while let Some(end) = data.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = (&data[..end], &data[end + 1..]);
            data = rest;
            if self.partial.len() + line.len() > MESSAGE_BYTES_MAX {
                return Err(TooLong);
            }
            self.partial.extend_from_slice(line);
            let line = std::mem::take(&mut self.partial);
            events.extend(self.message(&line));
        }
        if self.partial.len() + data.len() > MESSAGE_BYTES_MAX {
            return Err(TooLong);
        }
        self.partial.extend_from_slice(data);
        Ok(events)
    }

    /// What is not a message, or not one for an execution, is nothing.
    fn message(&mut self, line: &[u8]) -> Option<ExecutionEvent> {
        let message: Message = serde_json::from_slice(line).ok()?;
        match message.kind.as_str() {
            "stdout" => Some(ExecutionEvent::Stdout(message.text.into_bytes())),
            "stderr" => Some(ExecutionEvent::Stderr(message.text.into_bytes())),
            "result" => Some(ExecutionEvent::Result {
                main: message.main,
                data: message.data.0,
            }),
            "error" => Some(ExecutionEvent::Error {
                name: message.name,
                value: message.value,
                traceback: message.traceback,
            }),
            "end" => {
                self.ended |= message.id == self.expected;
                None
            }
            _ => None,
        }
    }
}

// === impl Marked ===

impl Marked {
    fn begin(&mut self, id: &str) {
        self.mark = mark(id);
        self.held.clear();
        self.ended = false;
    }

    /// The output in `data`, without the mark.
    fn feed(&mut self, data: &[u8]) -> Vec<u8> {
        let mut rest = std::mem::take(&mut self.held);
        rest.extend_from_slice(data);
        let mut output = Vec::with_capacity(rest.len());
        let mut rest = rest.as_slice();
        while let Some(at) = rest.iter().position(|byte| *byte == 0) {
            output.extend_from_slice(&rest[..at]);
            rest = &rest[at..];
            if let Some(after) = rest.strip_prefix(self.mark.as_slice()) {
                self.ended = true;
                rest = after;
            } else if self.mark.starts_with(rest) {
                self.held = rest.to_vec();
                return output;
            } else {
                output.push(0);
                rest = &rest[1..];
            }
        }
        output.extend_from_slice(rest);
        output
    }
}

fn mark(id: &str) -> Vec<u8> {
    format!("\0k8e {id}\n").into_bytes()
}

// === impl Mimes ===

impl<'de> Deserialize<'de> for Mimes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bounded;
        impl<'de> Visitor<'de> for Bounded {
            type Value = Mimes;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "at most {MIME_TYPES_MAX} texts by MIME type")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Mimes, A::Error> {
                let mut mimes = Vec::new();
                while let Some((mime, text)) = map.next_entry::<String, String>()? {
                    if mimes.len() >= MIME_TYPES_MAX || mime.len() > MIME_BYTES_MAX {
                        return Err(serde::de::Error::custom("too many MIME types"));
                    }
                    mimes.push((mime, text));
                }
                Ok(Mimes(mimes))
            }
        }
        deserializer.deserialize_map(Bounded)
    }
}

/// Whether code and environment can be sent to a kernel.
pub(super) fn check(language: Language, code: &str, env: &Env) -> Result<(), Error> {
    if language != Language::Bash {
        return Ok(());
    }
    if code.contains('\0') {
        return Err(Error::Invalid(
            "the code contains NUL, which bash cannot read: remove it".to_owned(),
        ));
    }
    let named = |name: &str| {
        let mut bytes = name.bytes();
        let first = bytes
            .next()
            .is_some_and(|byte| byte == b'_' || byte.is_ascii_alphabetic());
        first && bytes.all(|byte| byte == b'_' || byte.is_ascii_alphanumeric())
    };
    match env.iter().find(|(name, _)| !named(name)) {
        None => Ok(()),
        Some((name, _)) => Err(Error::Invalid(format!(
            "environment variable {name:?}: bash takes letters, digits and _ only"
        ))),
    }
}

/// An execution, for the kernel. Code and environment have passed [`check`].
pub(super) fn execution(language: Language, id: &str, code: &str, env: &Env) -> Bytes {
    match language {
        Language::Bash => shell_commands(id, code, env).into(),
        Language::Python | Language::Node | Language::Ts => {
            let env: BTreeMap<&str, &str> = env.iter().collect();
            let request = json!({
                "id": id,
                "code": code,
                "env": env,
                "message_bytes_max": MESSAGE_BYTES_MAX,
            });
            format!("{request}\n").into()
        }
    }
}

/// An interrupt, besides the signal: none where the signal is all.
pub(super) fn interrupt(language: Language, id: &str) -> Option<Bytes> {
    match language {
        Language::Node | Language::Ts => Some(format!("{}\n", json!({ "interrupt": id })).into()),
        Language::Python | Language::Bash => None,
    }
}

/// Commands for the interactive shell. An interrupt ends the one that runs, and the shell goes on with the next.
fn shell_commands(id: &str, code: &str, env: &Env) -> String {
    let mut text = String::new();
    for (name, value) in env.iter() {
        let value = quoted(value);
        let _ = writeln!(
            text,
            "[ -z \"${{{name}+x}}\" ] || __k8e_{name}=${name}; export {name}={value}"
        );
    }
    let _ = writeln!(text, "eval {} </dev/null", quoted(code));
    for (name, _) in env.iter() {
        let _ = writeln!(
            text,
            "if [ -n \"${{__k8e_{name}+x}}\" ]; then export {name}=$__k8e_{name}; unset __k8e_{name}; else unset {name}; fi"
        );
    }
    let _ = writeln!(text, "__k8e_end {id}");
    text
}

/// As one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// For the crate `fuzz`.
pub(crate) mod fuzzing {
    use super::{ExecutionEvent, Language, MIME_TYPES_MAX, Streams};

    /// Feeds both streams of a kernel to the decoder, whole and in two chunks. However they are cut, output and results
    /// are the same, and within the limits. Returns how many events there are, and whether the execution has ended.
    pub fn kernel_streams(data: &[u8]) -> (usize, bool) {
        let decoded = |language, cut: usize| {
            let mut streams = Streams::new(language);
            streams.begin("7");
            let (mut output, mut others) = (Vec::new(), Vec::new());
            for part in [&data[..cut], &data[cut..]] {
                let events = streams.stdout(part).unwrap_or_default();
                for event in events.into_iter().chain(streams.stderr(part)) {
                    match event {
                        ExecutionEvent::Stdout(bytes) => output.extend(bytes),
                        ExecutionEvent::Stderr(_) => {}
                        other @ (ExecutionEvent::Started { .. }
                        | ExecutionEvent::Result { .. }
                        | ExecutionEvent::Error { .. }) => others.push(other),
                    }
                }
            }
            (output, others, streams.ended())
        };
        for language in [Language::Bash, Language::Python] {
            let whole = decoded(language, data.len());
            assert_eq!(whole, decoded(language, data.len() / 2));
            assert!(whole.0.len() <= data.len());
        }
        let (_, events, ended) = decoded(Language::Python, data.len());
        for event in &events {
            if let ExecutionEvent::Result { data, .. } = event {
                assert!(data.len() <= MIME_TYPES_MAX);
            }
        }
        (events.len(), ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(chunks: &[&str]) -> (Vec<ExecutionEvent>, bool) {
        let mut streams = Streams::new(Language::Python);
        streams.begin("7");
        let events = chunks
            .iter()
            .flat_map(|chunk| streams.stdout(chunk.as_bytes()).unwrap())
            .collect();
        let Stdout::Lines(lines) = &streams.stdout else {
            panic!("python sends lines");
        };
        (events, lines.ended)
    }

    #[test]
    fn messages_are_decoded_across_chunks_and_the_rest_is_skipped() {
        let (events, ended) = lines(&[
            "{\"type\":\"stdout\",\"te",
            "xt\":\"a\"}\nnonsense\n{\"type\":\"other\"}\n[]\n",
            "{\"type\":\"result\",\"main\":true,\"data\":{\"text/plain\":\"1\"},\"x\":[[1]]}\n{\"type\":\"end\",\"id\":\"6\"}\n",
        ]);
        let data = vec![("text/plain".to_owned(), "1".to_owned())];
        let expected = [
            ExecutionEvent::Stdout(b"a".to_vec()),
            ExecutionEvent::Result { main: true, data },
        ];
        assert_eq!(events, expected);
        assert!(!ended, "the end of another execution");
        assert!(lines(&["{\"type\":\"end\",\"id\":\"7\"}\n"]).1);
    }

    #[test]
    fn messages_are_bounded() {
        let mut streams = Streams::new(Language::Node);
        let chunk = vec![b'x'; MESSAGE_BYTES_MAX];
        assert_eq!(streams.stdout(&chunk), Ok(vec![]));
        assert_eq!(streams.stdout(b"x"), Err(TooLong));
        let mimes: Vec<String> = (0..=MIME_TYPES_MAX)
            .map(|n| format!("\"a/{n}\":\"\""))
            .collect();
        let line = format!("{{\"type\":\"result\",\"data\":{{{}}}}}\n", mimes.join(","));
        assert_eq!(lines(&[&line]).0, []);
    }

    #[test]
    fn marks_are_found_however_they_are_cut() {
        let whole = b"a\0b\0k8e 7\0k8e 7\nrest";
        for cut in 0..whole.len() {
            let mut streams = Streams::new(Language::Bash);
            streams.begin("7");
            let mut seen = Vec::new();
            for part in [&whole[..cut], &whole[cut..]] {
                for event in streams.stdout(part).unwrap() {
                    let ExecutionEvent::Stdout(bytes) = event else {
                        panic!("only output");
                    };
                    seen.extend(bytes);
                }
            }
            assert_eq!(seen, b"a\0b\0k8e 7rest", "cut at {cut}");
            assert!(!streams.ended(), "standard error goes on");
            assert_eq!(streams.stderr(b"\0k8e 7\n"), None);
            assert!(streams.ended());
        }
    }

    #[test]
    fn code_is_one_word_for_the_shell() {
        assert_eq!(quoted("it's\n$x"), "'it'\\''s\n$x'");
        let env = Env::try_from(BTreeMap::from([("A B".to_owned(), String::new())])).unwrap();
        assert!(check(Language::Bash, "true", &env).is_err());
        assert!(check(Language::Python, "1", &env).is_ok());
        assert!(check(Language::Bash, "a\0b", &Env::default()).is_err());
    }
}
