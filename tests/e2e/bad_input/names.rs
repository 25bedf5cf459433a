//! File names that are no text, and directories with too many of them.

use super::Api;
use k8e_api::v1;
use k8e_e2e::{Ran, Server};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::process::Stdio;

const NAME: &[u8] = b"bad-\xff\xfe-name";

#[test]
fn names_that_are_not_text() {
    let server = Server::start();
    let session = server.session();
    let made = session.sh("printf content > $'bad-\\377\\376-name'");
    assert_eq!(made.code, 0, "{}", made.all());
    let listed = server.k8e(&["sandbox", "list", &session.id]).json();
    let file = &listed["files"][0];
    assert_eq!(
        file["path"], "/workspace/bad-\u{fffd}\u{fffd}-name",
        "{listed}"
    );
    assert_eq!(
        file["path_base64"], "L3dvcmtzcGFjZS9iYWQt//4tbmFtZQ==",
        "{listed}"
    );
    // By its bytes the file can be used, on the command line and over the API.
    let read = with_name(&server, &["sandbox", "read", &session.id], NAME);
    assert_eq!(read.json()["content"], "content", "{}", read.all());
    let stat = with_name(&server, &["sandbox", "stat", &session.id], NAME);
    assert_eq!(stat.json()["size"], 7, "{}", stat.all());
    let written = with_name(&server, &["sandbox", "write", &session.id], b"\xfe");
    assert_eq!(written.code, 0, "{}", written.all());
    let over_api = Api::of(&server).call(async |mut client| {
        let request = v1::ReadFileRequest {
            session_id: session.id.clone(),
            path: NAME.to_vec().into(),
            ..Default::default()
        };
        let mut messages = client.read_file(request).await?.into_inner();
        let mut content = Vec::new();
        while let Some(message) = messages.message().await? {
            if let Some(v1::read_file_response::Message::Data(data)) = message.message {
                content.extend_from_slice(&data);
            }
        }
        Ok::<_, tonic::Status>(content)
    });
    assert_eq!(over_api.unwrap(), b"content");
    let missing = with_name(&server, &["sandbox", "read", &session.id], b"\xfc\xfc");
    assert_eq!(missing.code, 1, "{}", missing.all());
    assert!(missing.json()["error"].is_string());
    let removed = with_name(&server, &["sandbox", "rm", &session.id], NAME);
    assert_eq!(removed.code, 0, "{}", removed.all());
    assert_eq!(session.sh("ls -A").stdout, b"\xfe\n");
}

#[test]
fn a_huge_directory() {
    let server = Server::start();
    let session = server.session();
    let made = session.py(
        "import os\nos.mkdir('huge')\nfd = os.open('huge', os.O_RDONLY)
for i in range(100_050): os.close(os.open(str(i), os.O_CREAT | os.O_WRONLY, dir_fd=fd))",
    );
    assert_eq!(made.code, 0, "{}", made.all());
    for (limit, want) in [("1000", 1_000), ("100000", 100_000)] {
        let listed = server.k8e(&["sandbox", "list", &session.id, "huge", "--limit", limit]);
        assert_eq!(listed.code, 0, "{}", listed.err());
        let listed = listed.json();
        assert_eq!(listed["truncated"], true, "it says that it is not all");
        assert_eq!(listed["files"].as_array().map(Vec::len), Some(want));
    }
    assert_eq!(session.sh("echo fine").out(), "fine\n");
    let removed = server.k8e(&["sandbox", "rm", "--recursive", &session.id, "huge"]);
    assert_eq!(removed.code, 0, "{}", removed.all());
    assert_eq!(session.sh("ls -A").out(), "");
}

fn with_name(server: &Server, args: &[&str], name: &[u8]) -> Ran {
    let output = server
        .command(args)
        .arg(OsStr::from_bytes(name))
        .stdin(Stdio::null())
        .output()
        .expect("k8e runs");
    Ran {
        code: output.status.code().expect("an exit code"),
        stdout: output.stdout,
        stderr: output.stderr,
    }
}
