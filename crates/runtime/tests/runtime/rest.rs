//! sandboxd's HTTP API (port 8080): files and probes.

use crate::support::{Answer, Runtime, ask, form};
use serde_json::json;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::sync::atomic::{AtomicBool, Ordering};

#[track_caller]
fn refused(answer: &Answer, status: u16, code: &str) {
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(answer.json()["code"], code);
    assert!(!answer.json()["message"].as_str().unwrap().is_empty());
}

#[test]
fn files_are_written_atomically_and_read_by_range() {
    let runtime = Runtime::start();
    let content: Vec<u8> = (0..=255u8).cycle().take(1_000_000).collect();
    let answer = runtime.rest("PUT", "/v1/files/a%2Fb%2Fc.bin?mode=0750", &content);
    assert_eq!((answer.status, answer.body.len()), (204, 0), "{answer:?}");
    let file = runtime.root().join("a/b/c.bin");
    assert_eq!(
        std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777,
        0o750
    );

    let answer = runtime.rest("GET", "/v1/files/a/b/c.bin", b"");
    assert_eq!((answer.status, answer.body == content), (200, true));
    assert_eq!(answer.header("content-length"), Some("1000000"));
    assert_eq!(answer.header("accept-ranges"), Some("bytes"));
    assert!(answer.header("last-modified").unwrap().ends_with("GMT"));

    let answer = runtime.rest("HEAD", "/v1/files/a%2Fb%2Fc.bin", b"");
    assert_eq!((answer.status, answer.body.len()), (200, 0));
    assert_eq!(answer.header("content-length"), Some("1000000"));

    for (range, want, of) in [
        ("bytes=10-19", &content[10..20], "bytes 10-19/1000000"),
        (
            "bytes=999990-",
            &content[999_990..],
            "bytes 999990-999999/1000000",
        ),
        (
            "bytes=-5",
            &content[999_995..],
            "bytes 999995-999999/1000000",
        ),
    ] {
        let answer = ask(
            runtime.rest,
            "GET",
            "/v1/files/a/b/c.bin",
            &[("range", range)],
            b"",
        );
        assert_eq!(
            (answer.status, answer.body.as_slice()),
            (206, want),
            "{range}"
        );
        assert_eq!(answer.header("content-range"), Some(of));
    }
    let answer = ask(
        runtime.rest,
        "GET",
        "/v1/files/a/b/c.bin",
        &[("range", "bytes=1000000-")],
        b"",
    );
    refused(&answer, 416, "INVALID_ARGUMENT");
    assert_eq!(answer.header("content-range"), Some("bytes */1000000"));

    // Replaced, with the default mode.
    assert_eq!(
        runtime.rest("PUT", "/v1/files/a/b/c.bin", b"new").status,
        204
    );
    assert_eq!(std::fs::read(&file).unwrap(), b"new");
    assert_eq!(
        std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777,
        0o644
    );
    assert_eq!(runtime.rest("PUT", "/v1/files/empty", b"").status, 204);
    let answer = runtime.rest("GET", "/v1/files/empty", b"");
    assert_eq!((answer.status, answer.body.len()), (200, 0));
}

#[test]
fn a_file_can_be_uploaded_as_a_form() {
    let runtime = Runtime::start();
    // Content that contains near misses of the delimiter.
    let content = b"\r\n--Xy\r\n--X\r\n--\r\n\r\n--XyA".repeat(20_000);
    let (kind, body) = form("file", "ignored", &content);
    let put = |kind: &str, body: &[u8]| {
        ask(
            runtime.rest,
            "PUT",
            "/v1/files/form",
            &[("content-type", kind)],
            body,
        )
    };
    assert_eq!(put(&kind, &body).status, 204);
    assert!(std::fs::read(runtime.root().join("form")).unwrap() == content);
    let (kind, body) = form("other", "x", b"x");
    refused(&put(&kind, &body), 400, "INVALID_ARGUMENT");
    refused(&put(&kind, b"no form"), 400, "INVALID_ARGUMENT");
    let (kind, body) = form("file", "x", b"cut");
    refused(
        &put(&kind, &body[..body.len() - 12]),
        400,
        "INVALID_ARGUMENT",
    );
    assert!(
        std::fs::read(runtime.root().join("form")).unwrap() == content,
        "it stays as it was"
    );
    assert_eq!(
        std::fs::read_dir(runtime.root()).unwrap().count(),
        1,
        "no temporary file stays"
    );
}

#[test]
fn directories_are_listed() {
    let runtime = Runtime::start();
    let root = runtime.root();
    std::fs::create_dir_all(root.join("d/sub")).unwrap();
    std::fs::write(root.join("d/f"), "1234").unwrap();
    symlink("f", root.join("d/link")).unwrap();
    symlink("nowhere", root.join("d/broken")).unwrap();
    symlink("/etc/passwd", root.join("d/out")).unwrap();
    let listing = runtime.rest("GET", "/v1/files/d", b"").json();
    assert_eq!(listing["path"], "/d");
    let entries = listing["entries"].as_array().unwrap();
    let told: Vec<_> = entries
        .iter()
        .map(|e| (&e["name"], &e["type"], &e["size"]))
        .collect();
    assert_eq!(told[0], (&json!("f"), &json!("file"), &json!(4)));
    assert_eq!(told[1], (&json!("link"), &json!("file"), &json!(4)));
    assert_eq!((told[2].0, told[2].1), (&json!("sub"), &json!("directory")));
    assert_eq!(told.len(), 3, "{listing}");
    let modified = entries[0]["modified_at"].as_str().unwrap();
    assert!(
        modified.len() == 20 && modified.ends_with('Z'),
        "{modified}"
    );
    assert_eq!(entries[2]["mode"], "0755");
    for path in ["/v1/files/", "/v1/files", "/v1/files/%2F", "/v1/files/%2E"] {
        let listing = runtime.rest("GET", path, b"").json();
        assert_eq!(
            (&listing["path"], &listing["entries"][0]["name"]),
            (&json!("/"), &json!("d")),
            "{path}"
        );
    }
    assert_eq!(runtime.rest("HEAD", "/v1/files/d", b"").status, 200);
    assert_eq!(runtime.rest("HEAD", "/v1/files/d/none", b"").status, 404);
    assert_eq!(runtime.rest("HEAD", "/v1/files/d/f/none", b"").status, 404);
}

#[test]
fn files_are_deleted_and_the_root_is_kept() {
    let runtime = Runtime::start();
    let root = runtime.root();
    std::fs::create_dir_all(root.join("d/sub/deep")).unwrap();
    std::fs::write(root.join("f"), "").unwrap();
    std::fs::create_dir(runtime.outside().join("kept")).unwrap();
    std::fs::write(runtime.outside().join("kept/file"), "").unwrap();
    symlink("../kept", root.join("link")).unwrap();
    let delete = |path: &str| runtime.rest("DELETE", &format!("/v1/files/{path}"), b"");
    refused(&delete("d"), 409, "CONFLICT");
    refused(&delete("none"), 404, "NOT_FOUND");
    refused(&delete("d?recursive=maybe"), 400, "INVALID_ARGUMENT");
    refused(&delete("?recursive=false"), 409, "CONFLICT");
    assert_eq!(delete("link").status, 204);
    assert_eq!(delete("f").status, 204);
    assert_eq!(delete("d?recursive=true").status, 204);
    assert!(!root.join("d").exists());
    std::fs::create_dir_all(root.join("x/y")).unwrap();
    symlink("../kept", root.join("link")).unwrap();
    assert_eq!(delete("?recursive=1").status, 204);
    assert_eq!(std::fs::read_dir(&root).unwrap().count(), 0);
    assert!(
        runtime.outside().join("kept/file").exists(),
        "a link is removed, not followed"
    );
}

#[test]
fn invalid_requests_are_refused_with_a_code() {
    let runtime = Runtime::start();
    let root = runtime.root();
    std::fs::create_dir(root.join("d")).unwrap();
    std::fs::write(root.join("f"), "").unwrap();
    symlink("/etc", root.join("out")).unwrap();
    symlink("loop", root.join("loop")).unwrap();
    refused(
        &runtime.rest("GET", "/v1/files/none", b""),
        404,
        "NOT_FOUND",
    );
    refused(
        &runtime.rest("GET", "/v1/files/..%2Fx", b""),
        403,
        "PERMISSION_DENIED",
    );
    refused(
        &runtime.rest("GET", "/v1/files/out%2Fpasswd", b""),
        403,
        "PERMISSION_DENIED",
    );
    refused(
        &runtime.rest("PUT", "/v1/files/out%2Fnew", b"x"),
        403,
        "PERMISSION_DENIED",
    );
    refused(
        &runtime.rest("DELETE", "/v1/files/out%2Fpasswd", b""),
        403,
        "PERMISSION_DENIED",
    );
    refused(
        &runtime.rest("GET", "/v1/files/loop", b""),
        400,
        "INVALID_ARGUMENT",
    );
    refused(
        &runtime.rest("PUT", "/v1/files/d", b"x"),
        400,
        "INVALID_ARGUMENT",
    );
    refused(
        &runtime.rest("PUT", "/v1/files/f%2Fx", b"x"),
        400,
        "INVALID_ARGUMENT",
    );
    refused(
        &runtime.rest("PUT", "/v1/files/", b"x"),
        400,
        "INVALID_ARGUMENT",
    );
    refused(
        &runtime.rest("PUT", "/v1/files/x?mode=777", b"x"),
        400,
        "INVALID_ARGUMENT",
    );
    refused(
        &runtime.rest("GET", "/v1/files/a%00b", b""),
        400,
        "INVALID_ARGUMENT",
    );
    refused(
        &runtime.rest("POST", "/v1/files/x", b"x"),
        405,
        "INVALID_ARGUMENT",
    );
    refused(&runtime.rest("GET", "/v2", b""), 404, "NOT_FOUND");
    let long = "x/".repeat(3000);
    refused(
        &runtime.rest("GET", &format!("/v1/files/{long}"), b""),
        400,
        "INVALID_ARGUMENT",
    );
}

#[test]
fn probes_and_metadata() {
    let env = [
        ("SANDBOX_COLOUR", "blue"),
        ("SANDBOX_API_KEY", "hidden"),
        ("SANDBOX_token", "hidden"),
        ("OTHER", "hidden"),
    ];
    let runtime = Runtime::with(&[], &env);
    let health = runtime.rest("GET", "/v1/health", b"").json();
    assert_eq!(health["status"], "ok");
    assert!(health["uptime_seconds"].is_u64());
    let metadata = runtime.rest("GET", "/v1/metadata", b"");
    assert_eq!(metadata.json()["env"]["SANDBOX_COLOUR"], "blue");
    assert!(!metadata.text().contains("hidden"), "{}", metadata.text());
}

#[test]
fn a_race_with_symbolic_links_does_not_leave_the_root() {
    let runtime = Runtime::start();
    let (root, out) = (runtime.root(), runtime.outside().join("out"));
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("secret"), "secret").unwrap();
    std::fs::create_dir(root.join("dir")).unwrap();
    symlink(&out, root.join("link")).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // A directory that is repeatedly replaced by a symbolic link out of the root.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let (here, there) = (root.join("dir"), root.join("link"));
                let cwd = rustix::fs::CWD;
                let exchange = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(cwd, &here, cwd, &there, exchange).unwrap();
            }
        });
        let (mut inside, mut refused) = (0, 0);
        for _ in 0..300 {
            let read = runtime.rest("GET", "/v1/files/dir%2Fsecret", b"");
            assert_ne!(read.text(), "secret");
            match runtime.rest("PUT", "/v1/files/dir%2Fnew", b"x").status {
                204 => inside += 1,
                403 => refused += 1,
                // It changed during the request.
                status => assert!([400, 404, 409, 500].contains(&status), "{status}"),
            }
            runtime.rest("DELETE", "/v1/files/dir%2Fsecret?recursive=true", b"");
        }
        stop.store(true, Ordering::Relaxed);
        assert!(
            inside > 0 && refused > 0,
            "{inside} inside, {refused} refused"
        );
    });
    let left: Vec<_> = std::fs::read_dir(&out)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["secret"]);
}
