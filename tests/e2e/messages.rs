//! Messages that people meet in their first hour, word for word: what was wrong, and what to do.
//!
//! A message that changes is changed here too, on purpose.

use crate::identity::{cert_dir, endpoint, ran, remote};
use k8e_e2e::{Ran, Server, binary};
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

const TCP: [&str; 2] = ["--listen", "127.0.0.1:0"];

/// The error of a command that printed JSON.
fn error(ran: &Ran) -> String {
    let json = ran.json();
    json["error"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_command_line_that_lacks_something() {
    let k8e = |args: &[&str]| ran(Command::new(binary()).args(args).stdin(Stdio::null()));
    let missing = k8e(&["sandbox", "get"]);
    assert_eq!(missing.code, 1);
    assert_eq!(error(&missing), "missing argument <SESSION>");
    assert_eq!(
        missing.json()["detail"],
        "usage: k8e sandbox get [OPTIONS] <SESSION>; see `k8e sandbox get --help`"
    );
    let unknown = k8e(&["sandbox", "rnu"]);
    assert_eq!(
        error(&unknown),
        "unknown command \"rnu\": the nearest command is `k8e sandbox run`"
    );
    let elsewhere = k8e(&["run", "true"]);
    assert!(
        elsewhere.err().contains("'k8e sandbox run'"),
        "{}",
        elsewhere.all()
    );
}

#[test]
fn a_timeout_with_raw_output() {
    let server = Server::start();
    let ran = server.k8e(&["sandbox", "run", "--raw", "--timeout", "1", "sleep 60"]);
    assert_eq!(ran.out(), "");
    assert_eq!(
        ran.err(),
        "k8e: the command timed out after 1s and was killed with all processes it started; --timeout sets the limit\n"
    );
    assert_ne!(ran.code, 0);
}

#[test]
fn a_certificate_of_another_server() {
    let (server, other) = (Server::start_with(&TCP), Server::start_with(&TCP));
    let ran = ran(remote(&server, cert_dir(&other).path(), "").args(["sandbox", "status"]));
    assert_eq!(ran.code, 2, "{}", ran.all());
    let want = format!(
        "the certificate of the server at {} was not signed by the authority in ca.crt: it is another server, or it \
         was set up anew; copy <data-dir>/tls/sandbox-ca.crt from that server to ca.crt in your certificate \
         directory (--cert-dir, else ~/.k8e/sandbox), in a way that you trust",
        endpoint(&server)
    );
    assert!(ran.err().contains(&want), "{}", ran.all());
}

#[test]
fn a_server_that_stops() {
    let mut server = Server::start_with(&TCP);
    let certs = cert_dir(&server);
    let key = crate::identity::key(&server, "ann", &[]);
    let mut client = remote(&server, certs.path(), &key)
        .args(["sandbox", "run", "--raw", "echo ready; sleep 60"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 6];
    let stdout = client.stdout.as_mut().unwrap();
    stdout.read_exact(&mut first).unwrap();
    server.kill();
    let ended = client.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    let want = "k8e: the connection to the k8e server was lost: it stopped, or the network to it broke; \
                `k8e sandbox status` shows whether it is back (";
    assert!(said.starts_with(want), "{said}");
    assert!(!said.contains("https://"), "{said}");
    assert_eq!(ended.status.code(), Some(2));
    server.restart();
}

#[test]
fn what_the_server_was_not_started_for() {
    let server = Server::start_with(&["--expose-listen", "none", "--max-cpus", "2"]);
    let session = server.session();
    let id = session.id.as_str();
    let exposed = server.k8e(&["sandbox", "expose", "8000", "--session-id", id]);
    assert_eq!(
        error(&exposed),
        "services cannot be exposed: this server has no listener for their visitors; restart it with an address that \
         is free, as in `k8e server --expose-listen 127.0.0.1:50052`"
    );
    let many = server.k8e(&["sandbox", "create", "--cpus", "64"]);
    assert_eq!(
        error(&many),
        "cpu limit of 64 CPUs is above this server's maximum of 2 CPUs: ask for less, or restart the server with a \
         higher --max-cpus"
    );
    let line = server.k8e(&["sandbox", "exec", id, "--", "ls -la"]);
    assert_eq!(
        error(&line),
        "program \"ls -la\" not found in the sandbox: it is one argument with spaces in it; give the program and each \
         argument as a word of its own (`k8e sandbox exec SESSION -- ls -la`), or a shell command line to \
         `k8e sandbox run`"
    );
}

#[test]
fn a_client_that_is_nobody() {
    let server = Server::start_with(&TCP);
    let certs = cert_dir(&server);
    let mut status = remote(&server, certs.path(), "");
    let nobody = ran(status.args(["sandbox", "status"]).uid(65534).gid(65534));
    let want = "missing API key or client certificate: give a key with --apikey or K8E_SANDBOX_APIKEY \
                (`k8e apikey create` on the server makes one), or log in with it once (`k8e login`)";
    assert!(nobody.all().contains(want), "{}", nobody.all());
    assert!(!nobody.all().contains("Bearer"), "{}", nobody.all());
}

/// The hint is a command, and it does what it says.
#[test]
fn a_host_that_is_not_allowed() {
    let server = Server::start();
    let session = server.session_with(&["--allowed-hosts", "none"]);
    let script = "getent hosts denied.example; getent hosts denied.example; true";
    let args = ["sandbox", "run", "--session-id", &session.id, script];
    let ran = server.k8e(&args);
    assert_eq!(
        ran.json()["egress_denied"],
        serde_json::json!(["denied.example"])
    );
    let command = format!(
        "k8e sandbox allow-hosts --session-id {} --add denied.example",
        session.id
    );
    let want = format!("k8e: the sandbox may not reach denied.example: `{command}` allows it\n");
    assert_eq!(ran.err(), want);
    let told = server.k8e(&["sandbox", "egress", &session.id]).json();
    let detail = format!("no rule of the session allows it; `{command}` allows it");
    assert_eq!(told["flows"][0]["detail"], detail, "{told}");
    let quiet = server.k8e(&["sandbox", "run", "--session-id", &session.id, "true"]);
    assert!(quiet.json().get("egress_denied").is_none());
    assert_eq!(quiet.err(), "");

    let words: Vec<&str> = command.split(' ').skip(1).collect();
    let allowed = server.k8e(&words);
    assert_eq!(allowed.code, 0, "{}", allowed.all());
    assert_eq!(
        allowed.json()["allowed_hosts"],
        serde_json::json!(["denied.example"])
    );
    let fresh = server.k8e(&[
        "sandbox",
        "run",
        "--fresh",
        "--raw",
        "--allowed-hosts",
        "none",
        script,
    ]);
    assert_eq!(
        fresh.err(),
        "k8e: the sandbox may not reach denied.example: `--allowed-hosts denied.example` allows it for the next run\n"
    );
}

#[test]
fn a_list_of_many_files() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(session.sh("touch $(seq 30)").code, 0);
    let list = |limit: &str| server.k8e(&["sandbox", "list", &session.id, "--limit", limit]);
    let some = list("10");
    assert_eq!(some.json()["files"].as_array().map(Vec::len), Some(10));
    assert_eq!(some.json()["truncated"], true);
    assert_eq!(
        some.err(),
        "k8e: the list ends after 10 files: name a directory, or raise --limit (100000 at most)\n"
    );
    let all = list("30");
    assert_eq!(all.json()["files"].as_array().map(Vec::len), Some(30));
    assert_eq!(all.json()["truncated"], false);
    assert_eq!(all.err(), "");
}

#[test]
fn a_run_that_is_not_over_has_no_exit_code() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(session.sh("mkfifo go").code, 0);
    let started = server.k8e(&[
        "sandbox",
        "run",
        "--session-id",
        &session.id,
        "--background",
        "read x < go; exit 3",
    ]);
    let run = started.json()["run_id"].as_str().unwrap().to_owned();
    let running = server.k8e(&["sandbox", "poll", &run]).json();
    assert_eq!(running["status"], "running", "{running}");
    assert!(running.get("exit_code").is_none(), "{running}");
    assert!(running.get("signal").is_none(), "{running}");
    let listed = server.k8e(&["sandbox", "runs", &session.id]).json();
    assert!(listed["runs"][0].get("exit_code").is_none(), "{listed}");
    assert_eq!(session.sh("echo > go").code, 0);
    let over = server.k8e(&["sandbox", "poll", &run, "--wait"]).json();
    assert_eq!(over["exit_code"], 3, "{over}");
    assert_eq!(over["signal"], 0, "{over}");
}

/// At a terminal, what is typed is not shown.
#[test]
fn a_secret_that_is_typed() {
    const TYPED: &str = "not-for-eyes-5fd1";
    let server = Server::start();
    let script = format!(
        "import os, pty, sys\n\
         pid, terminal = pty.fork()\n\
         if pid == 0: os.execv(sys.argv[1], sys.argv[1:])\n\
         said = b''\n\
         while b'): ' not in said: said += os.read(terminal, 1000)\n\
         os.write(terminal, b'{TYPED}\\n')\n\
         while True:\n    \
         try: more = os.read(terminal, 1000)\n    \
         except OSError: break\n    \
         if not more: break\n    \
         said += more\n\
         sys.stdout.buffer.write(said)\n\
         sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    );
    let mut python = Command::new("/usr/bin/python3");
    let socket = format!("unix://{}", server.socket().display());
    python.args(["-c", &script]).arg(binary());
    python.args(["secret", "set", "github:token"]);
    let typed = ran(python.env("K8E_SANDBOX_ENDPOINT", socket));
    assert_eq!(typed.code, 0, "{}", typed.all());
    let prompt = "value of github:token (not shown; Enter ends it): \r\n";
    assert!(typed.out().starts_with(prompt), "{}", typed.all());
    assert!(!typed.all().contains(TYPED), "{}", typed.all());
    let used = server.k8e(&[
        "sandbox",
        "run",
        "--raw",
        "--fresh",
        "--secret",
        "TOKEN=github:token",
        "echo \"<$TOKEN>\"",
    ]);
    assert_eq!(used.out(), format!("<{TYPED}>\n"), "{}", used.all());
}
