//! Paths that lead out of the workspace, and paths that no file can have.

use super::{Api, refused, told};
use k8e_api::client::Client;
use k8e_api::v1;
use k8e_e2e::Server;
use tonic::{Code, Status};

/// Every file command, on one path.
fn file_commands<'a>(id: &'a str, path: &'a str) -> Vec<Vec<&'a str>> {
    vec![
        vec!["sandbox", "read", id, path],
        vec!["sandbox", "write", id, path],
        vec!["sandbox", "list", id, path],
        vec!["sandbox", "stat", id, path],
        vec!["sandbox", "mkdir", id, path],
        vec!["sandbox", "mkdir", "--parents", id, path],
        vec!["sandbox", "mv", id, path, "moved"],
        vec!["sandbox", "mv", id, "there", path],
        vec!["sandbox", "rm", id, path],
        vec!["sandbox", "rm", "--recursive", id, path],
    ]
}

#[test]
fn a_path_with_dots() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(session.sh("echo kept > there; mkdir d").code, 0);
    for path in [
        "..",
        "../etc/passwd",
        "d/../../etc/passwd",
        "d/..",
        "/workspace/../etc",
    ] {
        for args in file_commands(&session.id, path) {
            refused(&server.k8e_with(&args, b"x"), &["'..'", "write it without"]);
        }
    }
    for path in ["/etc/passwd", "/", "/workspaces/x"] {
        for args in file_commands(&session.id, path) {
            let ran = server.k8e_with(&args, b"x");
            refused(&ran, &["outside /workspace", "k8e sandbox exec"]);
        }
    }
    let long = "a/".repeat(3000);
    for path in ["", &long] {
        refused(
            &server.k8e(&["sandbox", "stat", &session.id, path]),
            &["path is"],
        );
    }
    assert_eq!(session.sh("ls -A; cat there").out(), "d\nthere\nkept\n");
    server.assert_traces(1);
}

#[test]
fn a_link_out_of_the_workspace() {
    let server = Server::start();
    let session = server.session();
    let made = session.sh(
        "echo kept > there; mkdir /tmp/out; echo secret > /tmp/out/f
         ln -s /tmp/out dir; ln -s /tmp/out/f file; ln -s /tmp/out/new dangling; ln -s ../tmp/out rel
         ln -s /proc/self/root/tmp/out magic; ln -s loop loop",
    );
    assert_eq!(made.code, 0, "{}", made.all());
    // Below a link that leads out nothing can be reached, in any way.
    for path in ["dir/f", "dir/new", "rel/f", "rel/new", "magic/f"] {
        for args in file_commands(&session.id, path) {
            let ran = server.k8e_with(&args, b"evil");
            refused(&ran, &["leads out of", "/workspace"]);
            assert!(!ran.out().contains("secret"), "{}", ran.all());
        }
    }
    // What follows a link refuses one that leads out.
    for path in ["file", "dangling"] {
        refused(
            &server.k8e(&["sandbox", "read", &session.id, path]),
            &["leads out of"],
        );
        let args = ["sandbox", "write", &session.id, path];
        refused(&server.k8e_with(&args, b"evil"), &["leads out of"]);
        let args = ["sandbox", "write", "--mode", "a", &session.id, path];
        refused(&server.k8e_with(&args, b"evil"), &["leads out of"]);
    }
    refused(
        &server.k8e(&["sandbox", "list", &session.id, "dir"]),
        &["leads out of"],
    );
    refused(
        &server.k8e(&["sandbox", "read", &session.id, "loop"]),
        &["loop"],
    );
    // What does not follow it works on the link itself.
    let stat = server.k8e(&["sandbox", "stat", &session.id, "dir"]).json();
    assert_eq!(
        (&stat["type"], &stat["symlink_target"]),
        (&"symlink".into(), &"/tmp/out".into())
    );
    for args in [
        &["sandbox", "mv", &session.id, "file", "file2"][..],
        &["sandbox", "rm", &session.id, "file2"],
        &["sandbox", "rm", "--recursive", &session.id, "dir"],
    ] {
        assert_eq!(server.k8e(args).code, 0, "{args:?}");
    }
    assert_eq!(
        session
            .sh("cat /tmp/out/f; ls -A /tmp/out; cat there")
            .out(),
        "secret\nf\nkept\n",
        "nothing outside was touched"
    );
}

#[test]
fn a_nul_in_a_path() {
    let server = Server::start();
    let session = server.session();
    let api = Api::of(&server);
    for path in [&b"a\0b"[..], b"\0", b"/workspace/a\0"] {
        api.call(|client| each_file_call(client, &session.id, path));
    }
    assert_eq!(session.sh("ls -A").out(), "");
    server.assert_traces(1);
}

/// Every file call refuses the path.
async fn each_file_call(mut client: Client, id: &str, path: &[u8]) {
    let check = |result: Result<(), Status>| told(result, Code::InvalidArgument, &["contains NUL"]);
    let session_id = id.to_owned();
    let path = path.to_vec();
    let request = v1::ReadFileRequest {
        session_id: session_id.clone(),
        path: path.clone().into(),
        ..Default::default()
    };
    check(client.read_file(request).await.map(drop));
    let start = v1::WriteFileStart {
        session_id: session_id.clone(),
        path: path.clone().into(),
        ..Default::default()
    };
    let message = Some(v1::write_file_request::Message::Start(start));
    let request = tokio_stream::iter([v1::WriteFileRequest { message }]);
    check(client.write_file(request).await.map(drop));
    let request = v1::ListFilesRequest {
        session_id: session_id.clone(),
        path: path.clone().into(),
        ..Default::default()
    };
    check(client.list_files(request).await.map(drop));
    let request = v1::StatFileRequest {
        session_id: session_id.clone(),
        path: path.clone().into(),
    };
    check(client.stat_file(request).await.map(drop));
    let request = v1::MakeDirRequest {
        session_id: session_id.clone(),
        path: path.clone().into(),
        ..Default::default()
    };
    check(client.make_dir(request).await.map(drop));
    let request = v1::RemoveFileRequest {
        session_id: session_id.clone(),
        path: path.clone().into(),
        recursive: true,
    };
    check(client.remove_file(request).await.map(drop));
    for (from, to) in [(path.clone(), b"b".to_vec()), (b"b".to_vec(), path)] {
        let request = v1::MoveFileRequest {
            session_id: session_id.clone(),
            from: from.into(),
            to: to.into(),
        };
        check(client.move_file(request).await.map(drop));
    }
}
