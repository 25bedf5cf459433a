//! Command lines that make no sense, values out of range, servers that are not there.

use super::refused;
use k8e_e2e::{Ran, Server, binary};
use std::io::Write as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// `k8e` without a server.
fn k8e(args: &[&str], endpoint: Option<&str>) -> Ran {
    let mut command = Command::new(binary());
    command.args(args).env("K8E_NO_AUTOSTART", "1");
    command.env("K8E_DATA_DIR", "/nonexistent/k8e");
    match endpoint {
        Some(endpoint) => command.env("K8E_SANDBOX_ENDPOINT", endpoint),
        None => command.env_remove("K8E_SANDBOX_ENDPOINT"),
    };
    let output = command.stdin(Stdio::null()).output().expect("k8e runs");
    Ran {
        code: output.status.code().expect("an exit code"),
        stdout: output.stdout,
        stderr: output.stderr,
    }
}

#[test]
fn command_lines_that_make_no_sense() {
    for args in [
        &["sandbox", "run", "--nonsense", "true"][..],
        &["sandbox", "dance"],
        &["sandbox", "get"],
        &["sandbox", "exec", "s"],
        &["sandbox", "run", "x", "--lang", "cobol"],
        &["sandbox", "write", "s", "f", "--mode", "x"],
        &["sandbox", "write", "s", "f", "--perm", "rwx"],
        &["sandbox", "create", "--memory", "lots"],
        &["sandbox", "create", "--cpus", "-1"],
        &["sandbox", "create", "--env", "NOVALUE"],
    ] {
        let ran = k8e(args, None);
        assert_eq!(ran.code, 1, "{args:?}: {}", ran.all());
        assert!(ran.err().contains("--help"), "{args:?}: {}", ran.all());
        let json = ran.json();
        assert!(
            json["error"].as_str().is_some_and(|text| !text.is_empty()),
            "{args:?}: {json}"
        );
        assert!(
            json["detail"].as_str().unwrap().contains("--help"),
            "{args:?}: {json}"
        );
    }
    let raw = k8e(&["sandbox", "run", "--raw", "--nonsense"], None);
    assert_eq!((raw.code, raw.out().as_str()), (1, ""), "{}", raw.all());
    for args in [
        &["server", "--nonsense"][..],
        &["nonsense"],
        &["--nonsense"],
    ] {
        let ran = k8e(args, None);
        assert_eq!((ran.code, ran.out().as_str()), (1, ""), "{}", ran.all());
        assert!(ran.err().contains("--help"), "{}", ran.all());
    }
    let alone = k8e(&[], None);
    assert_eq!(alone.code, 1, "{}", alone.all());
    assert!(alone.err().contains("Usage"), "{}", alone.all());
}

#[test]
fn flags_of_the_server_that_cannot_work() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    for (flag, value, words) in [
        (
            "--default-memory",
            "1MiB",
            &["memory", "out of range", "use"][..],
        ),
        ("--default-pids", "1", &["pids", "out of range"]),
        ("--max-sessions", "0", &["1..=100000", "--help"]),
        ("--pool-max", "5000", &["a pool of 5000", "1024"]),
        ("--pool-min", "17", &["--pool-max"]),
        ("--run-timeout", "never", &["cannot be never", "30s"]),
        ("--listen", "here", &["127.0.0.1:50051", "none"]),
        ("--metrics-listen", "here", &["127.0.0.1:9464"]),
        ("--log", "=,=", &["--log", "info"]),
    ] {
        let ran = k8e(
            &["server", "--data-dir", data.to_str().unwrap(), flag, value],
            None,
        );
        assert_eq!(ran.code, 1, "{flag}: {}", ran.all());
        for word in words {
            assert!(
                ran.err().contains(word),
                "{flag}, no {word:?}: {}",
                ran.all()
            );
        }
    }
    assert!(!data.join("native").exists(), "nothing was begun");
}

#[test]
fn a_bad_timeout() {
    for time in ["soon", "-5", "1 fortnight", "", "s"] {
        let ran = k8e(
            &["sandbox", "run", "true", &format!("--timeout={time}")],
            None,
        );
        refused(&ran, &["--timeout"]);
        assert!(ran.all().contains("30s, 10m, 2h or never"), "{}", ran.all());
    }
    let server = Server::start();
    let ran = server.k8e(&["sandbox", "run", "true", "--timeout", "9999d"]);
    refused(&ran, &["timeout of", "-1 for none"]);
    server.assert_traces(0);
}

#[test]
fn limits_out_of_range() {
    let server = Server::start();
    for (flag, value) in [
        ("--memory", "1MiB"),
        ("--memory", "2000TiB"),
        ("--cpus", "0.001"),
        ("--cpus", "100000"),
        ("--pids", "1"),
        ("--pids", "4000000000"),
        ("--disk", "1MiB"),
        ("--disk", "9000TiB"),
    ] {
        for command in [
            &["create"][..],
            &["run", "true"],
            &["run", "true", "--fresh"],
        ] {
            let ran = server.k8e(&[&["sandbox"], command, &[flag, value]].concat());
            refused(&ran, &[&flag[2..flag.len().min(5)], "out of range", "use"]);
        }
    }
    for flag in ["--ttl", "--idle-timeout"] {
        let ran = server.k8e(&["sandbox", "create", flag, "99999999d"]);
        refused(&ran, &["use"]);
    }
    refused(
        &server.k8e(&["sandbox", "create", "--runtime", "docker"]),
        &["docker", "native"],
    );
    refused(
        &server.k8e(&["sandbox", "create", "--template", "nothing"]),
        &["nothing", "k8e template list"],
    );
    assert!(server.session_ids().is_empty());
    server.assert_traces(0);
}

#[test]
fn too_many_variables() {
    let server = Server::start();
    let pairs = |count: usize, bytes: usize| -> Vec<String> {
        (0..count)
            .map(|i| format!("--env=K{i}={}", "x".repeat(bytes)))
            .collect()
    };
    let with = |command: &[&str], flags: &[String]| {
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        server.k8e(&[command, &flags].concat())
    };
    for command in [&["sandbox", "create"][..], &["sandbox", "run", "true"]] {
        refused(
            &with(command, &pairs(65, 1)),
            &["env", "65 entries", "at most 64"],
        );
        refused(
            &with(command, &pairs(1, 5000)),
            &["env", "K0", "at most 4096"],
        );
        refused(
            &with(command, &pairs(20, 4000)),
            &["env", "in all", "at most 32768"],
        );
    }
    assert!(
        server.session_ids().is_empty(),
        "{:?}",
        server.session_ids()
    );
    let labels: Vec<String> = (0..65).map(|i| format!("--label=l{i}=x")).collect();
    refused(
        &with(&["sandbox", "create"], &labels),
        &["labels", "at most 64"],
    );
    let most = with(&["sandbox", "run", "env | grep -c ^K"], &pairs(64, 400));
    assert_eq!(most.json()["stdout"], "64\n", "{}", most.all());
}

#[test]
fn an_endpoint_where_nobody_is() {
    let dir = tempfile::tempdir().unwrap();
    let unix = |name: &str| format!("unix://{}", dir.path().join(name).display());
    drop(UnixListener::bind(dir.path().join("dead")).unwrap());
    std::fs::write(dir.path().join("file"), "").unwrap();
    for name in ["missing", "dead", "file"] {
        unreachable(&k8e(&["sandbox", "run", "true"], Some(&unix(name))), name);
    }
    unreachable(&k8e(&["sandbox", "run", "true"], None), "k8e server");
    let certs = dir.path().to_str().unwrap();
    let tcp = k8e(
        &["sandbox", "--cert-dir", certs, "get", "s"],
        Some("127.0.0.1:1"),
    );
    unreachable(&tcp, "--cert-dir");
    let wrong = k8e(&["sandbox", "run", "true"], Some("http://x:1"));
    refused(&wrong, &["unix:///path, host:port or https://host:port"]);
}

#[test]
fn an_endpoint_that_does_not_speak() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| {
        (
            UnixListener::bind(dir.path().join(name)).unwrap(),
            format!("unix://{}", dir.path().join(name).display()),
        )
    };
    let (closes, endpoint) = at("closes");
    std::thread::spawn(move || closes.incoming().for_each(drop));
    unreachable(&k8e(&["sandbox", "run", "true"], Some(&endpoint)), "");
    let (other, endpoint) = at("other");
    std::thread::spawn(move || {
        for stream in other.incoming().flatten() {
            let _ = (&stream).write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    unreachable(&k8e(&["sandbox", "run", "true"], Some(&endpoint)), "");
    // Takes the connection and says nothing.
    let (_silent, endpoint) = at("silent");
    let start = Instant::now();
    unreachable(&k8e(&["sandbox", "run", "true"], Some(&endpoint)), "");
    assert!(
        start.elapsed() < Duration::from_secs(20),
        "{:?}",
        start.elapsed()
    );
    assert!(!Path::new("/nonexistent").exists());
}

#[track_caller]
fn unreachable(ran: &Ran, word: &str) {
    assert_eq!(ran.code, 2, "{}", ran.all());
    let json = ran.json();
    assert!(
        json["error"].as_str().unwrap().contains(word),
        "{}",
        ran.all()
    );
    assert!(
        json["detail"].is_string() && ran.err().contains(word),
        "{}",
        ran.all()
    );
}
