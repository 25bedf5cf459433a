//! `k8e sandbox cp`: both directions, streams, and what a hostile sandbox tries with names, links and sizes.

use k8e_e2e::Server;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Nothing here takes longer, on a machine that runs other tests as well.
const SOON: Duration = Duration::from_secs(60);

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn a_directory_goes_in_and_comes_out_the_same() {
    let server = Server::start();
    let session = server.session();
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    std::fs::create_dir_all(source.join("deep/er")).unwrap();
    std::fs::create_dir(source.join("empty")).unwrap();
    std::fs::write(source.join("deep/er/big"), vec![7u8; 3 << 20]).unwrap();
    std::fs::write(source.join("run.sh"), "#!/bin/sh\necho ran\n").unwrap();
    let executable = std::fs::Permissions::from_mode(0o750);
    std::fs::set_permissions(source.join("run.sh"), executable).unwrap();
    let odd = OsStr::from_bytes(b"line\nbreak \xff");
    std::fs::write(source.join(odd), "odd").unwrap();
    symlink("/etc/passwd", source.join("link")).unwrap();

    let (from, to) = (source.to_str().unwrap(), format!("{}:", session.id));
    let up = server.k8e(&["sandbox", "cp", from, &to]);
    assert_eq!(up.code, 0, "{}", up.all());
    let bytes = (3 << 20) + 19 + 3;
    let want = serde_json::json!({
        "ok": true, "files": 3, "directories": 4, "bytes": bytes, "skipped": 1,
    });
    assert_eq!(up.json(), want);
    assert!(up.err().contains("1 symbolic links"), "{}", up.all());
    // Under its own name, because /workspace exists; and it can be executed.
    assert_eq!(
        session.sh("source/run.sh; stat -c %a source/run.sh").out(),
        "ran\n750\n"
    );
    assert_eq!(
        session.sh("test -e source/link || echo none").out(),
        "none\n"
    );

    let out = dir.path().join("out");
    let (from, to) = (format!("{}:source", session.id), out.to_str().unwrap());
    let down = server.k8e(&["sandbox", "cp", &from, to]);
    assert_eq!(down.code, 0, "{}", down.all());
    let want = serde_json::json!({
        "ok": true, "files": 3, "directories": 4, "bytes": bytes, "skipped": 0,
    });
    assert_eq!(down.json(), want);
    assert_eq!(
        std::fs::read(out.join("deep/er/big")).unwrap(),
        vec![7u8; 3 << 20]
    );
    assert_eq!(std::fs::read_to_string(out.join(odd)).unwrap(), "odd");
    assert!(out.join("empty").is_dir());
    let mode = std::fs::metadata(out.join("run.sh"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o700, 0o700);
    // Into a directory that exists: under its own name, or with /. what is in it.
    let again = server.k8e(&["sandbox", "cp", &from, to]);
    assert_eq!(again.code, 0, "{}", again.all());
    assert!(out.join("source/run.sh").is_file());
    std::fs::remove_dir_all(out.join("source")).unwrap();
    let inside = server.k8e(&["sandbox", "cp", &format!("{from}/."), to]);
    assert_eq!(inside.code, 0, "{}", inside.all());
    assert_eq!(
        names(&out).len(),
        names(&source).len() - 1,
        "{:?}",
        names(&out)
    );
}

#[test]
fn files_and_streams() {
    let server = Server::start();
    let session = server.session();
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| format!("{}:{path}", session.id);
    let data: Vec<u8> = (0..1_000_000u32).flat_map(u32::to_le_bytes).collect();
    let up = server.k8e_with(&["sandbox", "cp", "-", &at("in/data.bin")], &data);
    assert_eq!(up.json()["bytes"], data.len(), "{}", up.all());
    let down = server.k8e(&["sandbox", "cp", &at("in/data.bin"), "-"]);
    assert_eq!(
        (down.code, down.stdout == data),
        (0, true),
        "{}",
        down.err()
    );

    let file = dir.path().join("data.bin");
    let down = server.k8e(&[
        "sandbox",
        "cp",
        &at("in/data.bin"),
        dir.path().to_str().unwrap(),
    ]);
    assert_eq!(down.json()["files"], 1, "{}", down.all());
    assert_eq!(std::fs::read(&file).unwrap(), data);
    // A file that exists is replaced; a link to one stays a link.
    let link = dir.path().join("link");
    symlink(&file, &link).unwrap();
    assert_eq!(session.sh("echo new > in/data.bin").code, 0);
    let down = server.k8e(&["sandbox", "cp", &at("in/data.bin"), link.to_str().unwrap()]);
    assert_eq!(down.code, 0, "{}", down.all());
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "new\n");
    assert!(link.is_symlink());
    assert_eq!(names(dir.path()), ["data.bin", "link"]);
}

#[test]
fn a_hostile_sandbox_gets_nothing_out_of_its_directory() {
    let server = Server::start();
    let session = server.session();
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| format!("{}:{path}", session.id);
    let made = session.sh(
        "mkdir -p bad/sub; echo evil > bad/sub/file; echo evil > bad/plain; ln -s /etc/passwd bad/passwd; \
         ln -s ../.. bad/up; mkfifo bad/pipe; printf x > \"bad/$(printf 'a\\033[2Jb')\"",
    );
    assert_eq!(made.code, 0, "{}", made.all());
    let out = dir.path().join("out");
    let to = out.to_str().unwrap();
    let down = server.k8e(&["sandbox", "cp", &at("bad"), to]);
    assert_eq!(down.code, 0, "{}", down.all());
    assert_eq!(down.json()["skipped"], 3, "{}", down.all());
    assert!(!out.join("passwd").exists() && !out.join("up").exists());
    assert!(!down.stderr.contains(&0x1b), "{}", down.err());

    // A link that is there already is not written through: neither as a directory nor as a file.
    let outside = dir.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("kept"), "kept").unwrap();
    std::fs::remove_dir_all(out.join("sub")).unwrap();
    symlink(&outside, out.join("sub")).unwrap();
    std::fs::remove_file(out.join("plain")).unwrap();
    symlink(outside.join("kept"), out.join("plain")).unwrap();
    let through = server.k8e(&["sandbox", "cp", &at("bad/."), to]);
    assert_eq!(through.code, 1, "{}", through.all());
    assert!(through.err().contains("no directory"), "{}", through.all());
    assert_eq!(names(&outside), ["kept"]);
    assert_eq!(
        std::fs::read_to_string(outside.join("kept")).unwrap(),
        "kept"
    );

    // A file of any size costs the sandbox nothing.
    assert_eq!(session.sh("mkdir huge; truncate -s 1T huge/file").code, 0);
    for from in ["huge", "huge/file"] {
        let target = dir.path().join("huge");
        let args = [
            "sandbox",
            "cp",
            &at(from),
            target.to_str().unwrap(),
            "--max-size",
            "1MiB",
        ];
        let huge = server.k8e(&args);
        assert_eq!(huge.code, 1, "{}", huge.all());
        assert!(
            huge.json()["error"]
                .as_str()
                .unwrap()
                .contains("--max-size"),
            "{}",
            huge.all()
        );
        assert!(!target.exists());
    }
    assert_eq!(names(dir.path()), ["out", "outside"]);
}

#[test]
fn an_interrupted_copy_leaves_no_file() {
    let server = Server::start();
    let session = server.session();
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(session.sh("truncate -s 15G big; echo old > up").code, 0);
    let target = dir.path().join("big");
    let from = format!("{}:big", session.id);
    let mut copying = server
        .command(&["sandbox", "cp", &from, target.to_str().unwrap()])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + SOON;
    while !names(dir.path())
        .iter()
        .any(|name| name.starts_with(".k8e-cp-"))
    {
        assert!(Instant::now() < deadline && copying.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    let pid = rustix::process::Pid::from_child(&copying);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(copying.wait().unwrap().code(), Some(130));
    assert_eq!(names(dir.path()), [""; 0]);

    // The other way: what was there before stays.
    let to = format!("{}:up", session.id);
    let mut copying = server
        .command(&["sandbox", "cp", "-", &to])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = copying.stdin.take().unwrap();
    std::io::Write::write_all(&mut pipe, &vec![1; 4 << 20]).unwrap();
    copying.kill().unwrap();
    copying.wait().unwrap();
    drop(pipe);
    assert_eq!(session.sh("cat up").out(), "old\n");
}

#[test]
fn copies_that_cannot_be_made() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(session.sh("echo x > file; mkdir dir").code, 0);
    let at = |path: &str| format!("{}:{path}", session.id);
    for (from, to, words) in [
        (
            "a".to_owned(),
            "b".to_owned(),
            "neither side names a session",
        ),
        (at("a"), at("b"), "both sides name a session"),
        (at("nothing"), "/tmp/k8e-never".to_owned(), "nothing"),
        (
            "no-such-session:a".to_owned(),
            "/tmp/k8e-never".to_owned(),
            "no-such-session",
        ),
        ("/no/such/file".to_owned(), at("x"), "/no/such/file"),
        (at("file"), "/dev/null".to_owned(), "no regular file"),
        (
            at("file"),
            "/no/such/directory/file".to_owned(),
            "/no/such/directory",
        ),
        (at("../etc"), "/tmp/k8e-never".to_owned(), "'..'"),
        ("-".to_owned(), at("dir"), "is a directory"),
    ] {
        let ran = server.k8e(&["sandbox", "cp", &from, &to]);
        assert_eq!(ran.code, 1, "{from} {to}: {}", ran.all());
        let error = ran.json()["error"].as_str().unwrap().to_owned();
        assert!(error.contains(words), "{from} {to}: {}", ran.all());
    }
    assert!(
        std::fs::metadata("/dev/null")
            .unwrap()
            .file_type()
            .is_char_device()
    );
    assert!(!Path::new("/tmp/k8e-never").exists());
    // With `-` standard output is the file's: the error is on standard error only.
    let ran = server.k8e(&["sandbox", "cp", &at("nothing"), "-"]);
    assert_eq!((ran.code, ran.out().as_str()), (1, ""), "{}", ran.all());
}
