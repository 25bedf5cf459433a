//! Output formats of lists: tables on a terminal, JSON everywhere else.

use k8e_e2e::Server;
use rustix::fs::{Mode, OFlags};
use rustix::pty::OpenptFlags;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::process::Stdio;

/// What a command prints when its standard output is a terminal.
fn at_terminal(server: &Server, args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, String) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = rustix::pty::openpt(flags).unwrap();
    rustix::pty::unlockpt(&ours).unwrap();
    let name = rustix::pty::ptsname(&ours, Vec::new()).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let theirs = rustix::fs::open(name, flags, Mode::empty()).unwrap();
    let mut command = server.command(args);
    command.env_remove("NO_COLOR").envs(env.iter().copied());
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::from(theirs.as_fd().try_clone_to_owned().unwrap()))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(command);
    drop(theirs);
    let mut text = Vec::new();
    // Ends with EIO when nobody has the other side open any more.
    let _ = std::fs::File::from(ours).read_to_end(&mut text);
    let code = child.wait().unwrap().code();
    (code, String::from_utf8(text).unwrap().replace("\r\n", "\n"))
}

#[test]
fn lists_are_tables_on_a_terminal_and_json_elsewhere() {
    let server = Server::start();
    let session = server.session();
    let id = session.id.as_str();
    assert_eq!(
        session.sh("mkdir dir; printf '%2000s' x > dir/file").code,
        0
    );
    let saved = server.k8e(&["sandbox", "snapshot", "save", id, "one"]);
    assert_eq!(saved.code, 0, "{}", saved.all());
    let run = [
        "sandbox",
        "run",
        "--background",
        "sleep 1000",
        "--session-id",
        id,
    ];
    let run = server.k8e(&run).json()["run_id"]
        .as_str()
        .unwrap()
        .to_owned();
    for (args, titles, words, name) in [
        (
            &["sandbox", "sessions"][..],
            "SESSION",
            &[id, "active", "native"][..],
            id,
        ),
        (
            &["sandbox", "list", id],
            "PATH",
            &["/workspace/dir/file", "1.9 KiB"],
            "/workspace/dir",
        ),
        (
            &["sandbox", "ps", id],
            "PID",
            &["k8e-guest", "sleep 1000"],
            "1",
        ),
        (&["sandbox", "runs", id], "RUN", &[&run, "running"], &run),
        (&["sandbox", "snapshot", "list"], "NAME", &["one"], "one"),
        (&["template", "list"], "NAME", &[], ""),
    ] {
        // Golden: what programs read does not change.
        let json = server.k8e(args);
        assert_eq!(json.code, 0, "{}", json.all());
        assert!(json.json().is_object(), "{args:?}");
        let (code, text) = at_terminal(&server, args, &[]);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.starts_with(&format!("\x1b[1m{titles}")), "{text:?}");
        let (_, plain) = at_terminal(&server, args, &[("NO_COLOR", "1")]);
        assert!(
            plain.starts_with(titles) && !plain.contains('\x1b'),
            "{plain:?}"
        );
        for word in words {
            assert!(plain.contains(word), "{args:?}: no {word} in {plain}");
        }
        let (_, json) = at_terminal(&server, &[args, &["--json"]].concat(), &[]);
        assert!(json.starts_with('{'), "{json}");
        // Asked for, also where there is no terminal, and then without colour.
        let table = server.k8e(&[args, &["-o", "table"]].concat()).out();
        assert!(table.starts_with(titles), "{table:?}");
        let wide = server.k8e(&[args, &["-o", "wide"]].concat()).out();
        assert!(
            wide.lines().next().unwrap().len() > table.lines().next().unwrap().len(),
            "{wide}"
        );
        let names = server.k8e(&[args, &["-o", "name"]].concat()).out();
        assert!(
            name.is_empty() || names.lines().any(|line| line == name),
            "{names}"
        );
    }
    let wrong = server.k8e(&["sandbox", "sessions", "-o", "yaml"]);
    assert_eq!(wrong.code, 1, "{}", wrong.all());
    let failed = server.k8e(&["sandbox", "ps", "no-such-session", "-o", "table"]);
    assert_eq!(
        (failed.code, failed.out().as_str()),
        (1, ""),
        "{}",
        failed.all()
    );
}

#[test]
fn names_of_a_sandbox_do_not_move_the_cursor() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(session.sh("touch \"$(printf 'a\\033[2J\\nb')\"").code, 0);
    let (_, text) = at_terminal(
        &server,
        &["sandbox", "list", &session.id],
        &[("NO_COLOR", "1")],
    );
    assert!(text.contains("/workspace/a?[2J?b"), "{text:?}");
}
