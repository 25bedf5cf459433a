//! The Go server's SSE frames: `data: TEXT`, ended by an empty line; `{"pid":N}` first and `{"exit":N}` last.
//!
//! Text is not escaped, and a decoder takes the first empty line for the end of a frame. So in the Go server
//! output that ends with a newline swallows the frame that follows, which is the exit code; and a
//! program can print a frame. Here no text ends with a newline: that comes with the next text. One that
//! nothing follows, or another newline, is followed by a carriage return, which is the one byte that
//! is not the program's. And no text starts like a frame of ours: it is cut after its first character.

const PID: &str = "{\"pid\"";
const EXIT: &str = "{\"exit\"";

/// Encodes frames.
#[derive(Debug, Default)]
pub(super) struct Sse {
    /// A newline that was not sent yet.
    newline: bool,
}

// === impl Sse ===

impl Sse {
    pub(super) fn pid(pid: i32) -> String {
        frame(&format!("{PID}:{pid}}}"))
    }

    /// Text that does not end here.
    pub(super) fn data(&mut self, text: &str) -> String {
        if text.is_empty() {
            return String::new();
        }
        let held = std::mem::replace(&mut self.newline, text.ends_with('\n'));
        let text = text.strip_suffix('\n').unwrap_or(text);
        let mut safe = String::with_capacity(text.len() + 2);
        let start = if held { "\n" } else { "" };
        for c in start.chars().chain(text.chars()) {
            if c == '\n' && safe.ends_with('\n') {
                safe.push('\r');
            }
            safe.push(c);
        }
        if self.newline && safe.ends_with('\n') {
            safe.push('\r');
        }
        if safe.is_empty() {
            return String::new();
        }
        if safe.starts_with(PID) || safe.starts_with(EXIT) {
            return frame("{") + &frame(&safe[1..]);
        }
        frame(&safe)
    }

    /// The last frame, and a newline that nothing followed.
    pub(super) fn exit(&mut self, code: i32) -> String {
        let newline = std::mem::take(&mut self.newline);
        let rest = if newline {
            frame("\n\r")
        } else {
            String::new()
        };
        rest + &frame(&format!("{EXIT}:{code}}}"))
    }
}

fn frame(payload: &str) -> String {
    format!("data: {payload}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the Go decoder makes of it: data and the exit code.
    fn decoded(mut stream: &str) -> (String, Option<i32>) {
        let (mut data, mut exit) = (String::new(), None);
        while let Some((event, rest)) = stream.split_once("\n\n") {
            stream = rest;
            let Some(payload) = event.strip_prefix("data: ") else {
                continue;
            };
            if let Some(code) = payload.strip_prefix(EXIT) {
                assert_eq!(exit, None, "two ends");
                exit = Some(code[1..code.len() - 1].parse().unwrap());
            } else if !payload.starts_with(PID) {
                data += payload;
            }
        }
        assert_eq!(stream, "");
        (data, exit)
    }

    fn sent(chunks: &[&str]) -> (String, Option<i32>) {
        let mut sse = Sse::default();
        let mut stream = Sse::pid(7);
        for chunk in chunks {
            stream += &sse.data(chunk);
        }
        stream += &sse.exit(3);
        decoded(&stream)
    }

    #[test]
    fn frames_are_those_of_the_go_server() {
        let mut sse = Sse::default();
        assert_eq!(Sse::pid(12), "data: {\"pid\":12}\n\n");
        assert_eq!(sse.data("hello"), "data: hello\n\n");
        assert_eq!(sse.exit(0), "data: {\"exit\":0}\n\n");
    }

    #[test]
    fn the_exit_is_never_lost_and_never_forged() {
        for chunks in [
            &["hello\n"][..],
            &["a\n", "b\n"],
            &["a\n\nb\n\n\n"],
            &["\n", "\n", "\n"],
            &["a\n", "\n", "b"],
            &["{\"exit\":0}\n"],
            &["{\"exit\":0}\n\n", "data: {\"exit\":0}\n\n"],
            &["x\n\ndata: {\"exit\":0}\n\n"],
            &["{\"pid\":1}"],
            &["\n{\"exit\":0}\n\n"],
            &["", "é", ""],
        ] {
            let (data, exit) = sent(chunks);
            assert_eq!(exit, Some(3), "{chunks:?}");
            assert_eq!(data.replace('\r', ""), chunks.concat(), "{chunks:?}");
        }
    }

    #[test]
    fn lines_are_as_they_were_but_for_empty_ones_and_the_last() {
        assert_eq!(sent(&["a\nb\n", "c\nd"]).0, "a\nb\nc\nd");
        assert_eq!(sent(&["a\n\nb"]).0, "a\n\r\nb");
        assert_eq!(sent(&["a\n"]).0, "a\n\r");
    }
}
