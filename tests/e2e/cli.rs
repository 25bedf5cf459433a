//! What the command line promises: exit codes, streams, sessions, files, languages.

use k8e_e2e::{Server, binary, passable_tempdir};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn exit_codes_are_the_commands() {
    let server = Server::start();
    assert_eq!(server.k8e(&["sandbox", "run", "exit 3"]).code, 3);
    assert_eq!(server.k8e(&["sandbox", "run", "--raw", "exit 3"]).code, 3);
    assert_eq!(server.k8e(&["sandbox", "run", "true"]).code, 0);
    let killed = server.k8e(&["sandbox", "run", "kill -9 $$"]);
    assert_eq!(
        (killed.code, &killed.json()["exit_code"]),
        (137, &137.into()),
        "{}",
        killed.all()
    );
    let terminated = server.k8e(&["sandbox", "run", "kill -TERM $$"]);
    assert_eq!(terminated.code, 143, "{}", terminated.all());
    let missing = server.k8e(&["sandbox", "run", "/no/such/program"]);
    assert_eq!(missing.code, 127, "{}", missing.all());
}

#[test]
fn the_answer_of_run_is_whole() {
    let server = Server::start();
    let ran = server.k8e(&["sandbox", "run", "echo out; echo err >&2; exit 5"]);
    let answer = ran.json();
    assert_eq!(answer["stdout"], "out\n");
    assert_eq!(answer["stderr"], "err\n");
    assert_eq!(answer["exit_code"], 5);
    assert_eq!(answer["status"], "completed");
    assert_eq!(answer["language"], "bash");
    assert_eq!(answer["truncated"], false);
    assert_eq!(answer["runtime"], "native");
    assert!(answer["session_id"].as_str().unwrap().starts_with("sess-"));
    assert!(answer["duration_ms"].is_number());
}

#[test]
fn a_timeout_ends_everything_the_command_started() {
    let server = Server::start();
    let session = server.session();
    let start = Instant::now();
    let ran = session.run_json(
        &["--timeout", "1"],
        "sleep 60.5 & setsid sleep 60.5 & (setsid env -i sleep 60.5 &) ; sleep 60.5",
    );
    let took = start.elapsed();
    assert_eq!(ran["status"], "timed_out", "{ran}");
    assert!(
        took >= Duration::from_secs(1) && took < Duration::from_secs(6),
        "{took:?}"
    );
    let left = session.sh("pgrep -fc 'sleep 60[.]5'");
    assert_eq!(left.out(), "0\n", "{}", left.all());
}

#[test]
fn a_cancelled_client_ends_everything_the_command_started() {
    let server = Server::start();
    let session = server.session();
    let mut client = server
        .command(&[
            "sandbox",
            "run",
            "--raw",
            "--timeout",
            "0",
            "--session-id",
            &session.id,
            "echo ready; sleep 60.25 & sleep 60.25",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 6];
    std::io::Read::read_exact(client.stdout.as_mut().unwrap(), &mut first).unwrap();
    assert_eq!(&first, b"ready\n", "raw output is live");
    client.kill().unwrap();
    client.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while session.sh("pgrep -fc 'sleep 60[.]25'").out() != "0\n" {
        assert!(
            Instant::now() < deadline,
            "processes of a cancelled run are still there"
        );
    }
}

#[test]
fn ctrl_c_cancels_and_exits_130() {
    let server = Server::start();
    let session = server.session();
    let mut client = server
        .command(&[
            "sandbox",
            "run",
            "--raw",
            "--session-id",
            &session.id,
            "echo ready; sleep 60.75",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 6];
    std::io::Read::read_exact(client.stdout.as_mut().unwrap(), &mut first).unwrap();
    let pid = rustix::process::Pid::from_child(&client);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(client.wait().unwrap().code(), Some(130));
    let deadline = Instant::now() + Duration::from_secs(10);
    while session.sh("pgrep -fc 'sleep 60[.]75'").out() != "0\n" {
        assert!(Instant::now() < deadline, "the command outlived Ctrl-C");
    }
}

#[test]
fn much_stderr_does_not_hang() {
    let server = Server::start();
    let ran = server.k8e(&[
        "sandbox",
        "run",
        "--timeout",
        "120",
        "head -c 200000000 /dev/zero >&2; echo done",
    ]);
    let answer = ran.json();
    assert_eq!(answer["stdout"], "done\n");
    assert_eq!(answer["truncated"], true);
    assert_eq!(
        answer["stderr"].as_str().unwrap().len(),
        1 << 20,
        "cut at the limit"
    );
    let raw = server.command(&[
        "sandbox",
        "run",
        "--raw",
        "--timeout",
        "120",
        "head -c 200000000 /dev/zero >&2",
    ]);
    let mut raw = raw;
    let output = raw
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(output.stderr.len(), 200_000_000, "raw loses nothing");
}

#[test]
fn a_large_binary_file_comes_back_bit_for_bit() {
    let server = Server::start();
    let session = server.session();
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let data: Vec<u8> = (0..300 * 1024 * 1024 / 8)
        .flat_map(|_| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed.to_le_bytes()
        })
        .collect();
    let written = server.k8e_with(&["sandbox", "write", &session.id, "big.bin"], &data);
    assert_eq!(written.code, 0, "{}", written.all());
    let read = server.k8e(&["sandbox", "read", "--raw", &session.id, "big.bin"]);
    assert_eq!(read.code, 0, "{}", read.err());
    assert!(
        read.stdout == data,
        "{} bytes came back of {}",
        read.stdout.len(),
        data.len()
    );
}

#[test]
fn stdin_streams_to_the_command() {
    let server = Server::start();
    let session = server.session();
    let data: Vec<u8> = (0..5_000_000u32).flat_map(u32::to_le_bytes).collect();
    let cat = server.k8e_with(
        &[
            "sandbox",
            "exec",
            "--raw",
            "--stdin",
            &session.id,
            "--",
            "cat",
        ],
        &data,
    );
    assert!(cat.stdout == data);
}

#[test]
fn every_language_runs() {
    let server = Server::start();
    for (language, code, want) in [
        ("bash", "echo $((6 * 7))", "42\n"),
        (
            "python",
            "import sys\nprint(6 * 7, sys.version_info[0])",
            "42 3\n",
        ),
        ("node", "console.log(6 * 7)", "42\n"),
        ("ts", "const n: number = 6 * 7; console.log(n)", "42\n"),
    ] {
        let ran = server.k8e(&[
            "sandbox",
            "run",
            "--timeout",
            "60",
            "--lang",
            language,
            code,
        ]);
        assert_eq!(
            (ran.code, ran.json()["stdout"].as_str()),
            (0, Some(want)),
            "{language}: {}",
            ran.all()
        );
    }
    let quoting = r#"print('$HOME `id` "quoted" \\ \'x\'')"#;
    let ran = server.k8e(&["sandbox", "run", "--lang", "python", quoting]);
    assert_eq!(
        ran.json()["stdout"],
        "$HOME `id` \"quoted\" \\ 'x'\n",
        "no shell touches code"
    );
}

#[test]
fn a_missing_interpreter_is_told() {
    let server = Server::start();
    let session = server.session();
    session.sh("rm -f /usr/bin/node /usr/local/bin/node");
    let ran = server.k8e(&[
        "sandbox",
        "run",
        "--session-id",
        &session.id,
        "--lang",
        "node",
        "1",
    ]);
    assert_eq!(ran.code, 1, "{}", ran.all());
    let error = ran.json();
    assert!(
        error.to_string().contains("node") && error.to_string().contains("install"),
        "{error}"
    );
}

#[test]
fn code_sees_the_workspace() {
    let server = Server::start();
    let session = server.session();
    server.k8e_with(
        &["sandbox", "write", &session.id, "helper.py"],
        b"answer = 42\n",
    );
    let ran = session.py("import helper, os; print(helper.answer, os.getcwd())");
    assert_eq!(ran.out(), "42 /workspace\n", "{}", ran.all());
    // Code that commits or packs the workspace must not find itself in it.
    assert_eq!(session.sh("ls -A").out(), "__pycache__\nhelper.py\n");
    assert_eq!(
        session.py("import os; print(sorted(os.listdir()))").out(),
        "['__pycache__', 'helper.py']\n"
    );
    let node = session.run(
        &["--lang", "node"],
        "require('fs').writeFileSync('m.js', 'exports.n = 42'); console.log(require('./m').n)",
    );
    assert_eq!(node.out(), "42\n", "{}", node.all());
}

#[test]
fn a_tenants_session_is_used_again() {
    let server = Server::start();
    let first = server.k8e(&["sandbox", "run", "echo kept > f"]).json();
    let second = server.k8e(&["sandbox", "run", "cat f"]).json();
    assert_eq!(second["stdout"], "kept\n");
    assert_eq!(first["session_id"], second["session_id"]);
    let other = server
        .k8e(&["sandbox", "run", "--tenant", "other", "cat f"])
        .json();
    assert_ne!(other["session_id"], first["session_id"]);
    let fresh = server.k8e(&["sandbox", "run", "--fresh", "cat f"]).json();
    assert_ne!(fresh["session_id"], first["session_id"]);
    assert_eq!(
        server.session_ids().len(),
        2,
        "a fresh session is gone afterwards"
    );
}

#[test]
fn sessions_live_and_end() {
    let server = Server::start();
    let session = server.session_with(&[
        "--session-id",
        "mine",
        "--tenant",
        "t1",
        "--label",
        "a=b",
        "--env",
        "GREETING=hi",
        "--ttl",
        "1h",
    ]);
    assert_eq!(session.id, "mine");
    assert_eq!(
        session.sh("echo $GREETING; hostname").out().lines().next(),
        Some("hi")
    );
    let got = server.k8e(&["sandbox", "get", "mine"]).json();
    assert_eq!(got["phase"], "active");
    assert_eq!(got["tenant_id"], "t1");
    assert_eq!(got["env_keys"][0], "GREETING");
    assert!(
        !got.to_string().contains("\"hi\""),
        "values of the environment are not shown: {got}"
    );
    assert_eq!(
        got["allowed_hosts"],
        server.k8e(&["sandbox", "sessions"]).json()["sessions"][0]["allowed_hosts"]
    );
    let again = server.k8e(&["sandbox", "create", "--session-id", "mine"]);
    assert_eq!(again.code, 1, "{}", again.all());
    session.destroy();
    let ended = server.k8e(&["sandbox", "get", "mine"]).json();
    assert_eq!(ended["phase"], "ended", "{ended}");
    let run = server.k8e(&["sandbox", "run", "--session-id", "mine", "true"]);
    assert_eq!(run.code, 1, "{}", run.all());
    server.assert_traces(0);
}

#[test]
fn an_expired_session_is_gone() {
    let server = Server::start();
    let session = server.session_with(&["--ttl", "1s"]);
    let idle = server.session_with(&["--idle-timeout", "1s"]);
    // A running command keeps a session from being idle.
    let busy = idle.run(&["--timeout", "20"], "sleep 2.5; echo done");
    assert_eq!(busy.out(), "done\n", "{}", busy.all());
    let deadline = Instant::now() + Duration::from_secs(15);
    while !server.session_ids().is_empty() {
        assert!(
            Instant::now() < deadline,
            "expired sessions are still there"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    let got = server.k8e(&["sandbox", "get", &session.id]).json();
    assert!(
        got["reason"].as_str().unwrap().contains("1s"),
        "it says which time was over: {got}"
    );
    server.assert_traces(0);
}

#[test]
fn files_list_and_history() {
    let server = Server::start();
    let session = server.session();
    let id = session.id.as_str();
    assert_eq!(
        server
            .k8e_with(&["sandbox", "write", id, "a/b.txt"], b"one\n")
            .code,
        0
    );
    assert_eq!(
        server
            .k8e_with(
                &["sandbox", "write", id, "a/b.txt", "--mode", "a"],
                b"two\n"
            )
            .code,
        0
    );
    assert_eq!(
        server.k8e(&["sandbox", "read", id, "a/b.txt"]).json()["content"],
        "one\ntwo\n"
    );
    let listed = server.k8e(&["sandbox", "list", id]).json();
    let paths: Vec<&str> = listed["files"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|file| file["path"].as_str())
        .collect();
    assert!(paths.contains(&"/workspace/a/b.txt"), "{listed}");
    let far = server
        .k8e(&["sandbox", "list", id, "--since", "99999999999"])
        .json();
    assert_eq!(far["files"].as_array().map(Vec::len), Some(0), "{far}");
    session.sh("echo hello transcript");
    let log = server.k8e(&["sandbox", "log", id]);
    assert!(log.out().contains("hello transcript"), "{}", log.all());
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let events = server.k8e(&["sandbox", "events", id]);
        if events.out().contains("run_ended") && events.out().contains("created") {
            break;
        }
        assert!(Instant::now() < deadline, "{}", events.all());
    }
    session.sh("sleep 47.5 & true");
    let ps = server.k8e(&["sandbox", "ps", id]).json();
    assert!(
        ps["processes"]
            .as_array()
            .unwrap()
            .iter()
            .any(|process| process["comm"] == "sleep"),
        "{ps}"
    );
}

#[test]
fn a_server_starts_by_itself() {
    let dir = passable_tempdir("k8e-auto-");
    let data = dir.path().join("data");
    let k8e = |args: &[&str]| {
        Command::new(binary())
            .args(args)
            .env("K8E_DATA_DIR", &data)
            .env_remove("K8E_SANDBOX_ENDPOINT")
            .env_remove("K8E_NO_AUTOSTART")
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    let off = k8e(&["sandbox", "--no-autostart", "run", "true"]);
    assert_eq!(
        off.status.code(),
        Some(2),
        "{}",
        String::from_utf8_lossy(&off.stderr)
    );
    let first = k8e(&["sandbox", "run", "--raw", "echo auto"]);
    assert_eq!(
        String::from_utf8_lossy(&first.stdout),
        "auto\n",
        "{}",
        String::from_utf8_lossy(&first.stderr)
    );
    assert!(
        String::from_utf8_lossy(&first.stderr).contains("start"),
        "it says that it started a server"
    );
    let second = k8e(&["sandbox", "run", "--raw", "echo again"]);
    assert_eq!(String::from_utf8_lossy(&second.stdout), "again\n");
    assert!(
        second.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&second.stderr)
    );
    let sessions: serde_json::Value =
        serde_json::from_slice(&k8e(&["sandbox", "sessions"]).stdout).unwrap();
    for session in sessions["sessions"].as_array().unwrap() {
        k8e(&[
            "sandbox",
            "destroy",
            session["session_id"].as_str().unwrap(),
        ]);
    }
    let pid: i32 = std::fs::read_to_string(data.join("lock"))
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid).unwrap(),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    // It has sandboxes in its pool to remove before its directory goes.
    let deadline = Instant::now() + Duration::from_secs(20);
    while Path::new("/proc").join(pid.to_string()).exists() {
        assert!(Instant::now() < deadline, "the server ends");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_server_that_started_by_itself_gives_way() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let run = ["sandbox", "run", "--runtime", "native", "--raw"];
    let auto = Command::new(binary())
        .args(run)
        .arg("echo kept > f")
        .env("K8E_DATA_DIR", &data)
        .env_remove("K8E_SANDBOX_ENDPOINT")
        .env_remove("K8E_NO_AUTOSTART")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(auto.status.success(), "{auto:?}");
    let pid = || std::fs::read_to_string(data.join("lock")).unwrap();
    let first = pid();
    // Its sessions go on with the one that somebody starts.
    let server = Server::start_in(&data);
    assert_ne!(pid(), first);
    assert_eq!(server.pid().to_string(), pid().trim());
    let kept = server.k8e(&[&run[..], &["cat f"]].concat());
    assert_eq!(kept.out(), "kept\n", "{}", kept.all());
    // That one does not give way.
    let second = Command::new(binary())
        .args(["server", "--listen", "none", "--expose-listen", "none"])
        .env("K8E_DATA_DIR", &data)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1), "{second:?}");
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(said.contains("another k8e server"), "{said}");
    assert_eq!(server.k8e(&["sandbox", "status"]).code, 0);
}

#[test]
fn completions_and_help() {
    for shell in ["bash", "zsh", "fish"] {
        let out = Command::new(binary())
            .args(["completion", shell])
            .output()
            .unwrap();
        assert!(out.status.success() && out.stdout.len() > 1000, "{shell}");
    }
    let help = Command::new(binary())
        .args(["sandbox", "run", "--help"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&help.stdout).into_owned();
    assert!(
        help.status.success() && text.contains("--lang") && text.contains("k8e sandbox run"),
        "{text}"
    );
}

#[test]
fn over_tls_a_certificate_says_who_it_is() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let address = format!("127.0.0.1:{port}");
    let server = Server::start_with(&["--listen", &address]);
    let admin = server.data_dir().join("tls/admin");
    let command = |cert_dir: &std::path::Path, args: &[&str]| {
        let mut command = Command::new(binary());
        command
            .args(["sandbox", "--endpoint", &address, "--cert-dir"])
            .arg(cert_dir)
            .args(args)
            .env_remove("K8E_SANDBOX_ENDPOINT")
            .stdin(Stdio::null());
        command
    };
    let k8e = |cert_dir: &std::path::Path, args: &[&str]| command(cert_dir, args).output().unwrap();
    let ran = k8e(&admin, &["run", "--raw", "echo over tls"]);
    assert_eq!(
        String::from_utf8_lossy(&ran.stdout),
        "over tls\n",
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    // A caller with a certificate owns what it makes and sees nothing else.
    let local = server.session();
    let foreign = k8e(&admin, &["get", &local.id]);
    assert_eq!(foreign.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&foreign.stdout).contains("not found"));
    let nobody = tempfile::tempdir().unwrap();
    std::fs::copy(admin.join("ca.crt"), nobody.path().join("ca.crt")).unwrap();
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(nobody.path(), open).unwrap();
    // Without one nobody is let in, root on this machine included.
    for user in [0, 65534] {
        let mut refused = command(nobody.path(), &["run", "true"]);
        let refused = refused.uid(user).gid(user).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{user}: {said}");
        for word in ["missing API key", "k8e apikey create", "--trust-loopback"] {
            assert!(said.contains(word), "{user}: {said}");
        }
    }
}

#[test]
fn what_a_sandbox_may_ask_for_has_a_ceiling() {
    let server = Server::start_with(&[
        "--max-memory",
        "1GiB",
        "--max-disk",
        "8GiB",
        "--max-sessions",
        "2",
    ]);
    for (flag, value) in [
        ("--memory", "2GiB"),
        ("--disk", "9GiB"),
        ("--pids", "100000"),
        ("--cpus", "999"),
    ] {
        let made = server.k8e(&["sandbox", "create", flag, value]);
        assert_eq!(made.code, 1, "{flag}: {}", made.all());
        assert!(made.out().contains("maximum"), "{flag}: {}", made.all());
    }
    let (_a, _b) = (server.session(), server.session());
    let third = server.k8e(&["sandbox", "create"]);
    assert_eq!(third.code, 1, "{}", third.all());
    assert!(third.out().contains("--max-sessions"), "{}", third.all());
}

#[test]
fn ordinary_programs_work_inside() {
    let server = Server::start();
    let session = server.session_with(&["--memory", "1GiB"]);
    for (script, want) in [
        ("useradd bob && id -u bob", "1001\n"),
        ("su bob -c 'echo $USER $HOME'", "bob /home/bob\n"),
        ("su user -c 'touch ~/f && stat -c %U ~/f'", "user\n"),
        (
            "su user -c 'id -un'; runuser -u nobody -- id -un",
            "user\nnobody\n",
        ),
        (
            "git init -q r && cd r && git -c user.email=a@b -c user.name=n commit -q --allow-empty -m x && git log --format=%s",
            "x\n",
        ),
        (
            "python3 -c 'import multiprocessing as m; print(m.Pool(2).map(abs, [-1, -2]))'",
            "[1, 2]\n",
        ),
        (
            "mv /usr/share/doc /usr/share/doc2 && ls -d /usr/share/doc2",
            "/usr/share/doc2\n",
        ),
        (
            "python3 -c 'import socket; print(socket.gethostbyname(socket.gethostname()))'",
            "127.0.0.1\n",
        ),
        ("script -qec tty /dev/null | tr -d '\\r'", "/dev/pts/0\n"),
        (
            "(python3 -m http.server 8000 >/dev/null 2>&1 & for i in $(seq 50); do sleep 0.1; python3 -c 'import urllib.request as u; print(u.urlopen(\"http://localhost:8000\").status)' 2>/dev/null && break; done)",
            "200\n",
        ),
    ] {
        let ran = session.sh(script);
        assert_eq!(ran.out(), want, "{script}: {}", ran.all());
    }
}

#[test]
fn a_hardened_server_offers_what_is_safe() {
    let mut server = Server::start_with(&["--hardened"]);
    let refused = server.k8e(&["sandbox", "run", "true"]);
    assert_eq!(
        (refused.code, refused.json()["detail"].as_str()),
        (1, Some("denied")),
        "{}",
        refused.all()
    );
    assert!(refused.all().contains("--allow-host-template"));
    assert!(
        server
            .log_text()
            .contains("sessions need a template of an image")
    );

    server.stop();
    server.restart_with(&["--allow-host-template"]);
    let made = server.k8e(&["sandbox", "create"]).json();
    assert_eq!(made["allowed_hosts"], serde_json::json!(["none"]), "{made}");
    server.k8e(&["sandbox", "destroy", made["session_id"].as_str().unwrap()]);
    server.stop();
    server.restart_with(&["--allowed-hosts", "a.example"]);
    let made = server.k8e(&["sandbox", "create"]).json();
    assert_eq!(
        made["allowed_hosts"],
        serde_json::json!(["a.example"]),
        "{made}"
    );
}
