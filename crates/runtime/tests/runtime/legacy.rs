//! The legacy HTTP API (port 8888).

use crate::support::{Runtime, TIMEOUTS, ask, form, is_alive, until};
use serde_json::json;
use std::os::unix::fs::symlink;

#[test]
fn a_command_runs_without_a_shell() {
    let runtime = Runtime::with(&[], &[("SANDBOX_COLOUR", "blue")]);
    let said = runtime.execute(&json!({"command": "echo 'a  b' $HOME \"c|d\""}));
    let want =
        json!({"stdout": "a  b $HOME c|d\n", "stderr": "", "exit_code": 0, "timed_out": false});
    assert_eq!(said, want);
    let command = "sh -c 'pwd; echo $SANDBOX_COLOUR; echo oops >&2; exit 3'";
    let said = runtime.execute(&json!({"command": command}));
    let pwd = runtime.app().canonicalize().unwrap();
    assert_eq!(said["stdout"], format!("{}\nblue\n", pwd.display()));
    assert_eq!(
        (&said["stderr"], &said["exit_code"]),
        (&json!("oops\n"), &json!(3))
    );
    let said = runtime.execute(&json!({"command": "sh -c 'kill -9 $$'"}));
    assert_eq!(said["exit_code"], 137);
}

#[test]
fn a_command_that_cannot_start_has_exit_code_one() {
    let runtime = Runtime::start();
    for (command, why) in [
        ("no-such-program", "no-such-program"),
        ("echo 'open", "no closing quotation"),
        ("", "no program"),
    ] {
        let said = runtime.execute(&json!({"command": command}));
        assert_eq!(said["exit_code"], 1, "{said}");
        let stderr = said["stderr"].as_str().unwrap();
        assert!(
            stderr.starts_with("Failed to execute command: "),
            "{stderr}"
        );
        assert!(stderr.contains(why), "{stderr}");
    }
}

#[test]
fn a_timeout_kills_the_command_with_all_descendants() {
    // One in the background, one in a session of its own, both without the pipes.
    let command = "sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!; setsid sh -c \"echo \\$\\$; exec sleep 1000\" \
                   & echo said; exec sleep 1000'";
    let begun = |stdout: &str| stdout.lines().count() == 3 && stdout.contains("said\n");
    let mut tries = TIMEOUTS.into_iter().map(|timeout| {
        let flag = format!("-exec-timeout={}ms", timeout.as_millis());
        let runtime = Runtime::with(&[&flag], &[]);
        let said = runtime.execute(&json!({"command": command}));
        assert_eq!(
            (&said["timed_out"], &said["exit_code"]),
            (&json!(true), &json!(124))
        );
        let stderr = said["stderr"].as_str().unwrap();
        let told = format!("timed out after {} seconds", timeout.as_secs_f64());
        assert!(stderr.contains(&told), "{stderr}");
        let stdout = said["stdout"].as_str().unwrap().to_owned();
        (runtime, stdout)
    });
    // On a busy machine the timeout may pass before the command has started.
    let (runtime, stdout) = tries.find(|(_, stdout)| begun(stdout)).unwrap();
    for pid in stdout.lines().filter(|line| *line != "said") {
        assert!(!is_alive(pid), "{pid} lives");
    }
    // The timeout of the request overrides the default.
    let said = runtime.execute(&json!({"command": "sleep 1", "timeout_seconds": 100}));
    assert_eq!(
        (&said["timed_out"], &said["exit_code"]),
        (&json!(false), &json!(0))
    );
}

#[test]
fn a_background_process_does_not_delay_the_response() {
    let runtime = Runtime::start();
    let said = runtime.execute(&json!({"command": "sh -c 'sleep 1000 & echo $!'"}));
    let pid = said["stdout"].as_str().unwrap();
    assert!(is_alive(pid));
    let said = runtime.execute(&json!({"command": format!("kill {pid}")}));
    assert_eq!(said["exit_code"], 0, "{said}");
    until("it ends", || !is_alive(pid));
}

#[test]
fn a_client_disconnect_kills_the_command() {
    let runtime = Runtime::start();
    let request = json!({"command": "sh -c 'echo $$ > pid.tmp; mv pid.tmp pid; exec sleep 1000'"})
        .to_string();
    let mut stream = crate::support::connect(runtime.legacy);
    let head = format!(
        "POST /execute HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        request.len()
    );
    std::io::Write::write_all(&mut stream, format!("{head}{request}").as_bytes()).unwrap();
    let file = runtime.app().join("pid");
    until("it runs", || file.exists());
    let pid = std::fs::read_to_string(&file).unwrap();
    assert!(is_alive(&pid));
    drop(stream);
    until("it ends", || !is_alive(&pid));
}

#[test]
fn output_over_the_limit_is_truncated_with_a_notice() {
    let runtime = Runtime::with(&["-max-output-bytes=1000"], &[]);
    let said =
        runtime.execute(&json!({"command": "sh -c 'yes | head -c 100000; echo fine >&2; exit 4'"}));
    assert_eq!(said["stdout"].as_str().unwrap().len(), 1000);
    let stderr = said["stderr"].as_str().unwrap();
    assert!(
        stderr.starts_with("fine\n") && stderr.contains("1000 of 100000 bytes"),
        "{stderr}"
    );
    assert_eq!(said["exit_code"], 4);
}

#[test]
fn invalid_requests_are_refused() {
    let runtime = Runtime::start();
    for body in [
        "",
        "{}",
        "[]",
        "{\"command\": 1}",
        "{\"command\": \"true\", \"timeout_seconds\": -1}",
    ] {
        let answer = runtime.legacy("POST", "/execute", body.as_bytes());
        assert_eq!(answer.status, 422, "{body}: {answer:?}");
        assert!(answer.json()["detail"].is_string());
    }
    let form = ask(
        runtime.legacy,
        "POST",
        "/execute",
        &[("content-type", "text/plain")],
        br#"{"command": "true"}"#,
    );
    assert_eq!(form.status, 422);
    let page = [
        ("content-type", "application/json"),
        ("origin", "http://elsewhere"),
    ];
    let page = ask(
        runtime.legacy,
        "POST",
        "/execute",
        &page,
        br#"{"command": "true"}"#,
    );
    assert_eq!(page.status, 403);
    assert_eq!(runtime.legacy("GET", "/execute", b"").status, 405);
    assert_eq!(runtime.legacy("GET", "/other", b"").status, 404);
    assert_eq!(runtime.legacy("POST", "/upload", b"x").status, 422);
    let answer = runtime.legacy("GET", "/", b"");
    assert_eq!(
        (answer.status, &answer.json()["status"]),
        (200, &json!("ok"))
    );
}

#[test]
fn files_are_uploaded_listed_and_downloaded() {
    let runtime = Runtime::start();
    let content: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    let (kind, body) = form("file", "sub dir/ünï.bin", &content);
    let headers = [
        ("content-type", kind.as_str()),
        ("x-sandbox-id", "s"),
        ("x-sandbox-port", "8888"),
    ];
    let answer = ask(runtime.legacy, "POST", "/upload", &headers, &body);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(
        answer.json()["message"],
        "File 'sub dir/ünï.bin' uploaded successfully."
    );
    assert_eq!(
        std::fs::read(runtime.app().join("sub dir/ünï.bin")).unwrap(),
        content
    );

    let escaped = "sub%20dir%2F%C3%BCn%C3%AF.bin";
    let answer = runtime.legacy("GET", &format!("/download/{escaped}"), b"");
    assert_eq!((answer.status, answer.body == content), (200, true));
    assert_eq!(
        answer.header("content-type"),
        Some("application/octet-stream")
    );

    std::fs::write(runtime.app().join("empty"), "").unwrap();
    let answer = runtime.legacy("GET", "/download/empty", b"");
    assert_eq!((answer.status, answer.body.len()), (200, 0));

    symlink("sub dir", runtime.app().join("link")).unwrap();
    symlink("/etc", runtime.app().join("out")).unwrap();
    let answer = runtime.legacy("GET", "/list/", b"");
    let listed = answer.json();
    let names: Vec<_> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|e| (e["name"].clone(), e["type"].clone()))
        .collect();
    assert_eq!(
        names,
        [
            ("empty", "file"),
            ("link", "directory"),
            ("sub dir", "directory")
        ]
        .map(|(name, kind)| (json!(name), json!(kind)))
    );
    let inside = runtime.legacy("GET", "/list/sub%20dir", b"").json();
    assert_eq!(inside[0]["size"], content.len());
    assert!(inside[0]["mod_time"].as_f64().unwrap() > 1.6e9);
    assert_eq!(runtime.legacy("GET", "/list/missing", b"").status, 404);
    assert_eq!(runtime.legacy("GET", "/list/empty", b"").status, 404);
    assert_eq!(runtime.legacy("GET", "/download/missing", b"").status, 404);
    assert_eq!(runtime.legacy("GET", "/download/link", b"").status, 404);

    for (path, exists) in [
        ("empty", true),
        ("sub%20dir", true),
        ("no", false),
        ("empty%2Fno", false),
    ] {
        let answer = runtime.legacy("GET", &format!("/exists/{path}"), b"");
        assert_eq!(
            (answer.status, &answer.json()["exists"]),
            (200, &json!(exists)),
            "{path}"
        );
    }
}

#[test]
fn no_path_leads_out() {
    let runtime = Runtime::start();
    std::fs::write(runtime.outside().join("secret"), "s").unwrap();
    symlink(runtime.outside(), runtime.app().join("out")).unwrap();
    symlink("../secret", runtime.app().join("file")).unwrap();
    for path in [
        "..%2Fsecret",
        "%2E%2E/secret",
        "out%2Fsecret",
        "file",
        "out/secret",
    ] {
        for what in ["download", "list", "exists"] {
            let answer = runtime.legacy("GET", &format!("/{what}/{path}"), b"");
            assert_eq!(answer.status, 403, "{what} {path}: {answer:?}");
        }
    }
    for name in ["../new", "out/new", "/../new", "file"] {
        let (kind, body) = form("file", name, b"x");
        let answer = ask(
            runtime.legacy,
            "POST",
            "/upload",
            &[("content-type", &kind)],
            &body,
        );
        assert_eq!(answer.status, 403, "{name}: {answer:?}");
    }
    assert!(!runtime.outside().join("new").exists());
    assert_eq!(
        std::fs::read(runtime.outside().join("secret")).unwrap(),
        b"s"
    );
    // An absolute path is relative to the root.
    let (kind, body) = form("file", "/etc/passwd", b"x");
    let answer = ask(
        runtime.legacy,
        "POST",
        "/upload",
        &[("content-type", &kind)],
        &body,
    );
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(
        std::fs::read(runtime.app().join("etc/passwd")).unwrap(),
        b"x"
    );
}
