//! `k8e sandbox cp`: copies files and directories between this machine and a session.
//!
//! Symbolic links are neither followed below the source nor created, in both directions: what comes out of a sandbox is
//! hostile, and a link in it could lead anywhere.

mod download;
mod names;
mod upload;

use crate::failure::Failure;
use crate::output;
use crate::render::Text;
use crate::units;
use clap::Args;
use k8e_api::client::{Client, Streaming};
use k8e_api::status::{Status, from_status};
use k8e_api::v1;
use k8e_model::{Code, SessionId};
use serde::Serialize;
use std::ffi::{OsStr, OsString};
use std::time::{Duration, Instant};

/// First paragraphs of `k8e sandbox cp --help`.
pub(super) const LONG_ABOUT: &str = "\
Copy a file, or a directory with everything in it, to a session or out of it. One side is SESSION:PATH,
with a path below /workspace, and the other a path on this machine, or - for standard input or output.

Into an existing directory it is copied under its own name, as cp -r does; SOURCE/. copies what is in
the directory. Each file appears under its name when it is complete, with its permissions. Symbolic
links, sockets and devices below SOURCE are left out and counted as `skipped`. An interrupted copy
keeps the complete files and starts from the beginning when it is repeated.";

/// Default of --max-size: more than the disk of most sessions. Sparse files make the size of what comes out of a
/// sandbox independent of its disk limit, so without a bound code in it could fill the disk of this machine.
const SIZE_MAX_DEFAULT: &str = "16GiB";

/// Pause between two progress lines.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

const MIB: u64 = 1024 * 1024;

/// Arguments of `k8e sandbox cp`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox cp data.csv $SID:data.csv
  k8e sandbox cp project $SID:                 # /workspace/project
  k8e sandbox cp $SID:results results
  k8e sandbox cp $SID:results/. results        # what is in it
  tar c src | k8e sandbox cp - $SID:src.tar
  k8e sandbox cp $SID:model.bin - | sha256sum

A local file whose name has a colon is written as ./a:b.

Output:
  {\"ok\":true,\"files\":3,\"directories\":1,\"bytes\":4096,\"skipped\":0}
  Nothing but the file when the target is -.")]
pub struct CpArgs {
    /// What to copy: PATH, SESSION:PATH, or - for standard input
    #[arg(value_name = "SOURCE")]
    source: OsString,

    /// Where to: SESSION:PATH, PATH, or - for standard output
    #[arg(value_name = "TARGET")]
    target: OsString,

    /// Largest total size that is copied out of a session to files
    #[arg(long, default_value = SIZE_MAX_DEFAULT, value_name = "SIZE", value_parser = units::size)]
    max_size: u64,
}

/// A validated copy.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Copy {
    /// From this machine to a session.
    Upload { source: Local, target: Remote },
    /// From a session to this machine.
    Download {
        source: Remote,
        target: Local,
        bytes_max: u64,
    },
}

/// A path on this machine, or a standard stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Local {
    Stream,
    Path(OsString),
}

/// A path in a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    session_id: String,
    /// As it was typed; need not be UTF-8.
    path: Vec<u8>,
}

/// What was copied; JSON output.
#[derive(Debug, Default, Serialize)]
struct CopiedJson {
    ok: bool,
    files: u64,
    directories: u64,
    bytes: u64,
    /// Symbolic links, sockets and devices.
    skipped: u64,
}

/// Counts what is copied, and shows it on a terminal.
#[derive(Debug)]
struct Progress {
    copied: CopiedJson,
    shown: Option<Instant>,
}

// === impl CpArgs ===

impl CpArgs {
    /// Whether standard output is the copied file.
    pub(crate) fn to_stdout(&self) -> bool {
        self.target == "-"
    }

    /// Checks the two sides before a server is contacted, or started.
    pub(crate) fn request(self) -> Result<Copy, Failure> {
        let invalid = |text: &str| Err(Failure::request(text, "invalid"));
        match (side(&self.source)?, side(&self.target)?) {
            (Ok(source), Err(target)) => Ok(Copy::Upload { source, target }),
            (Err(source), Ok(target)) => Ok(Copy::Download {
                source,
                target,
                bytes_max: self.max_size,
            }),
            (Ok(_), Ok(_)) => invalid(
                "neither side names a session: write one of them as SESSION:PATH, as in `k8e sandbox cp a.txt $SID:a.txt`",
            ),
            (Err(_), Err(_)) => invalid(
                "both sides name a session: copy to this machine first; a local file with a colon is written as ./a:b",
            ),
        }
    }
}

/// A side of the copy: local is `Ok`, remote is `Err`.
fn side(text: &OsStr) -> Result<Result<Local, Remote>, Failure> {
    if text.is_empty() {
        return Err(Failure::request("a path to copy is empty", "invalid"));
    }
    if text == "-" {
        return Ok(Ok(Local::Stream));
    }
    let bytes = text.as_encoded_bytes();
    let colon = bytes.iter().position(|byte| *byte == b':');
    let slash = bytes.iter().position(|byte| matches!(byte, b'/' | b'\\'));
    match colon {
        // A slash before the colon: a local name. On Windows `C:` is a drive.
        Some(colon) if slash.is_none_or(|slash| colon < slash) && !is_drive(&bytes[..colon]) => {
            let session_id = String::from_utf8_lossy(&bytes[..colon]).into_owned();
            session_id.parse::<SessionId>()?;
            let path = match &bytes[colon + 1..] {
                b"" => b".".to_vec(),
                path => path.to_vec(),
            };
            Ok(Err(Remote { session_id, path }))
        }
        _ => Ok(Ok(Local::Path(text.to_owned()))),
    }
}

fn is_drive(name: &[u8]) -> bool {
    cfg!(windows) && name.len() == 1 && name[0].is_ascii_alphabetic()
}

pub(crate) async fn run(copy: Copy, mut client: Client) -> Result<u8, Failure> {
    let mut progress = Progress {
        copied: CopiedJson::default(),
        shown: None,
    };
    let (result, prints) = match copy {
        Copy::Upload { source, target } => {
            let copied = upload::run(&mut client, source, target, &mut progress);
            (Box::pin(copied).await, true)
        }
        Copy::Download {
            source,
            target: Local::Stream,
            ..
        } => (download::stream(&mut client, &source).await, false),
        Copy::Download {
            source,
            target: Local::Path(target),
            bytes_max,
        } => {
            let copied = download::run(&mut client, source, target, bytes_max, &mut progress);
            (Box::pin(copied).await, true)
        }
    };
    output::progress("");
    result?;
    if prints {
        let copied = progress.copied;
        if copied.skipped > 0 {
            output::note(&format!(
                "{} symbolic links, sockets or devices were left out",
                copied.skipped
            ));
        }
        output::json(&CopiedJson { ok: true, ..copied })?;
    }
    Ok(0)
}

type Listing = Streaming<v1::ListFilesResponse>;

/// What there is at a path of a session; links are followed.
#[derive(Debug, PartialEq, Eq)]
enum RemoteKind {
    File,
    Directory,
}

/// The kind of what a path leads to.
async fn kind(client: &mut Client, remote: &Remote) -> Result<RemoteKind, Status> {
    let request = v1::StatFileRequest {
        session_id: remote.session_id.clone(),
        path: remote.path.clone().into(),
    };
    let file = client.stat_file(request).await?.into_inner();
    Ok(match file.r#type.as_str() {
        "directory" => RemoteKind::Directory,
        // Only a directory can be listed.
        "symlink" if list(client, remote, false).await.is_ok() => RemoteKind::Directory,
        _ => RemoteKind::File,
    })
}

/// The kind of the target of an upload, if it exists. When it is the session that does not, the next call says so.
async fn existing(client: &mut Client, target: &Remote) -> Result<Option<RemoteKind>, Failure> {
    match kind(client, target).await {
        Ok(kind) => Ok(Some(kind)),
        Err(status) if from_status(&status).code == Code::NotFound => Ok(None),
        Err(status) => Err(status.into()),
    }
}

/// Starts a listing, and returns its first message.
async fn list(
    client: &mut Client,
    remote: &Remote,
    recursive: bool,
) -> Result<(Option<v1::ListFilesResponse>, Listing), Status> {
    let request = v1::ListFilesRequest {
        session_id: remote.session_id.clone(),
        path: remote.path.clone().into(),
        recursive,
        since_unix_s: 0,
    };
    let mut pages = client.list_files(request).await?.into_inner();
    let first = pages.message().await?;
    Ok((first, pages))
}

// === impl Remote ===

impl Remote {
    /// The path below this one.
    fn join(&self, name: &[u8]) -> Self {
        let mut path = self.path.clone();
        if path.last() != Some(&b'/') {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        Self {
            session_id: self.session_id.clone(),
            path,
        }
    }

    /// The last name; `None` for `.`, `..` and `/`, and when the path ends with `/.`.
    fn name(&self) -> Option<&[u8]> {
        let mut end = self.path.as_slice();
        while let [rest @ .., b'/'] = end {
            end = rest;
        }
        let name = end.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        (!matches!(name, b"" | b"." | b"..")).then_some(name)
    }

    /// For messages.
    fn show(&self) -> String {
        let path = Text::from(self.path.clone()).text;
        format!("{}:{}", self.session_id, printable(&path))
    }
}

/// Text without control characters: names of files may move the cursor of a terminal.
fn printable(text: &str) -> String {
    text.chars()
        .map(|char| if char.is_control() { '?' } else { char })
        .collect()
}

// === impl Progress ===

impl Progress {
    fn bytes(&mut self, count: usize, name: &str) {
        self.copied.bytes += count as u64;
        if self.shown.is_some_and(|at| at.elapsed() < PROGRESS_EVERY) {
            return;
        }
        self.shown = Some(Instant::now());
        let CopiedJson { files, bytes, .. } = self.copied;
        let (whole, tenth) = (bytes / MIB, bytes % MIB * 10 / MIB);
        let name: String = printable(name).chars().take(NAME_CHARS_MAX).collect();
        output::progress(&format!("{files} files, {whole}.{tenth} MiB  {name}"));
    }
}

/// Part of a name that a progress line shows.
const NAME_CHARS_MAX: usize = 48;

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(source: &str, target: &str) -> Result<Copy, Failure> {
        let args = CpArgs {
            source: source.into(),
            target: target.into(),
            max_size: 5,
        };
        args.request()
    }

    fn remote(session_id: &str, path: &str) -> Remote {
        Remote {
            session_id: session_id.into(),
            path: path.into(),
        }
    }

    #[test]
    fn one_side_is_a_session() {
        assert_eq!(
            parsed("a/b", "sess-1:c").unwrap(),
            Copy::Upload {
                source: Local::Path("a/b".into()),
                target: remote("sess-1", "c"),
            }
        );
        assert_eq!(
            parsed("sess-1:/workspace/a:b", "./x:y").unwrap(),
            Copy::Download {
                source: remote("sess-1", "/workspace/a:b"),
                target: Local::Path("./x:y".into()),
                bytes_max: 5,
            }
        );
        assert_eq!(
            parsed("-", "s:").unwrap(),
            Copy::Upload {
                source: Local::Stream,
                target: remote("s", "."),
            }
        );
        for (source, target, word) in [
            ("a", "b", "neither"),
            ("s:a", "t:b", "both"),
            ("", "s:a", "empty"),
            ("-", "-", "neither"),
            ("Not An Id:a", "b", "session id"),
        ] {
            let Err(Failure::Told { error, .. }) = parsed(source, target) else {
                panic!("{source} {target}");
            };
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn names_of_remote_paths() {
        for (path, name) in [
            ("a/b", Some("b")),
            ("/workspace/a/", Some("a")),
            ("a/.", None),
            (".", None),
            ("/", None),
            ("a/..", None),
        ] {
            assert_eq!(remote("s", path).name(), name.map(str::as_bytes), "{path}");
        }
        assert_eq!(remote("s", "a").join(b"b"), remote("s", "a/b"));
        assert_eq!(remote("s", "a/").join(b"b"), remote("s", "a/b"));
        assert_eq!(remote("s", "a\x1b[2J").show(), "s:a?[2J");
    }
}
