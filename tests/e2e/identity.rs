//! Who may come in, from the command line: keys, logins, the audit, and what ends them.

use k8e_e2e::{Ran, Server};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const TCP: [&str; 2] = ["--listen", "127.0.0.1:0"];

/// Where a server listens for TLS; after a restart, where the newest does.
pub(crate) fn endpoint(server: &Server) -> String {
    let log = server.log_text();
    let at = log.rfind("https://127.0.0.1:").expect("the log says where");
    log[at..].split_whitespace().next().unwrap().to_owned()
}

/// A directory with the server's authority, that everybody may read.
pub(crate) fn cert_dir(server: &Server) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(dir.path(), open).unwrap();
    let ca = server.data_dir().join("tls/sandbox-ca.crt");
    std::fs::copy(ca, dir.path().join("ca.crt")).unwrap();
    dir
}

/// A client elsewhere, as far as one machine can be elsewhere.
pub(crate) fn remote(server: &Server, certs: &Path, key: &str) -> Command {
    let mut command = Command::new(k8e_e2e::binary());
    command
        .env("K8E_SANDBOX_ENDPOINT", endpoint(server))
        .env("K8E_SANDBOX_CERT_DIR", certs)
        .env("K8E_SANDBOX_APIKEY", key)
        .env("K8E_NO_AUTOSTART", "1")
        .env_remove("K8E_SANDBOX_SESSION_ID")
        .env_remove("K8E_SANDBOX_TENANT")
        .stdin(Stdio::null());
    command
}

pub(crate) fn ran(command: &mut Command) -> Ran {
    let output = command.output().unwrap();
    Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: output.stdout,
        stderr: output.stderr,
    }
}

pub(crate) fn key(server: &Server, name: &str, flags: &[&str]) -> String {
    let made = server.k8e(&[&["apikey", "create", name], flags].concat());
    assert_eq!(made.code, 0, "{}", made.all());
    made.json()["key"].as_str().unwrap().to_owned()
}

fn audit(server: &Server, flags: &[&str]) -> Vec<Value> {
    let shown = server.k8e(&[&["audit"], flags].concat());
    assert_eq!(shown.code, 0, "{}", shown.all());
    let rows = shown.out();
    rows.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn a_key_is_made_once_listed_and_deleted() {
    let server = Server::start();
    let made = server
        .k8e(&["apikey", "create", "ann", "--expires", "30d"])
        .json();
    let key = made["key"].as_str().unwrap();
    assert!(key.starts_with("k8e_") && key.len() == 68, "{key}");
    assert_eq!(made["e2b_key"], key.replace("k8e_", "e2b_"));
    assert_eq!(made["principal"], "ann");
    let days = made["expires_at"].as_i64().unwrap() - made["created_at"].as_i64().unwrap();
    assert_eq!(days, 30 * 86400);
    let listed = server.k8e(&["apikey", "list"]);
    assert_eq!(listed.json()["keys"][0]["name"], "ann");
    assert!(!listed.out().contains(&key[4..]), "{}", listed.all());
    let again = server.k8e(&["apikey", "create", "ann"]);
    assert_eq!(
        (again.code, again.json()["detail"].as_str()),
        (1, Some("exists"))
    );
    let id = made["id"].as_str().unwrap();
    assert_eq!(server.k8e(&["apikey", "delete", id]).json()["ok"], true);
    let gone = server.k8e(&["apikey", "delete", id]);
    assert_eq!(
        (gone.code, gone.json()["detail"].as_str()),
        (1, Some("not_found"))
    );
    assert!(!server.log_text().contains(&key[4..]), "not in the log");
    for bad in [
        &["apikey", "create", "a b"][..],
        &["apikey", "create", "x", "--expires", "-1"],
    ] {
        assert_eq!(server.k8e(bad).code, 1, "{bad:?}");
    }
}

#[test]
fn a_key_makes_sessions_for_its_tenants_only() {
    let server = Server::start_with(&TCP);
    let certs = cert_dir(&server);
    let ann = key(&server, "ann", &["--tenant", "web", "--tenant", "db"]);
    let bob = key(&server, "bob", &[]);
    let listed = server.k8e(&["apikey", "list"]).json();
    assert_eq!(
        listed["keys"][0]["tenants"],
        serde_json::json!(["web", "db"])
    );
    assert_eq!(listed["keys"][1]["tenants"], serde_json::json!(["bob"]));

    let k8e = |key: &str, args: &[&str]| ran(remote(&server, certs.path(), key).args(args));
    let refused = k8e(&ann, &["sandbox", "run", "--tenant", "other", "true"]);
    assert_eq!(refused.json()["detail"], "denied", "{}", refused.all());
    for says in [
        "tenant other",
        "web, db",
        "k8e apikey create NAME --tenant other",
    ] {
        assert!(refused.all().contains(says), "{}", refused.all());
    }
    for (key, tenant) in [(&ann, "web"), (&bob, "bob")] {
        let ran_it = k8e(key, &["sandbox", "run", "true"]);
        assert_eq!(ran_it.code, 0, "{}", ran_it.all());
        let id = &ran_it.json()["session_id"];
        let status = k8e(key, &["sandbox", "status"]).json();
        assert_eq!(
            (&status["session_id"], &status["tenant_id"]),
            (id, &tenant.into())
        );
        let shown = k8e(key, &["sandbox", "exposed"]).json();
        assert_eq!(&shown["session_id"], id);
        let shown = server.k8e(&["sandbox", "get", id.as_str().unwrap()]).json();
        assert_eq!(shown["tenant_id"], tenant);
    }
    let star = key(&server, "platform", &["--tenant", "*"]);
    let ran_it = k8e(&star, &["sandbox", "run", "--tenant", "other", "true"]);
    assert_eq!(ran_it.code, 0, "{}", ran_it.all());
}

#[test]
fn a_key_reaches_the_server_from_elsewhere_until_it_is_deleted() {
    let mut server = Server::start_with(&TCP);
    let (certs, ann) = (cert_dir(&server), key(&server, "ann", &[]));
    let mut run = remote(&server, certs.path(), &ann);
    // Not root: nothing but the key says who it is.
    let ran_it = ran(run
        .args(["sandbox", "run", "echo hi"])
        .uid(65534)
        .gid(65534));
    assert_eq!(ran_it.json()["stdout"], "hi\n", "{}", ran_it.all());
    let id = ran_it.json()["session_id"].as_str().unwrap().to_owned();
    let shown = server.k8e(&["sandbox", "get", &id]).json();
    assert_eq!(shown["owner"], "user:ann");
    let nobody = ran(remote(&server, certs.path(), "")
        .args(["sandbox", "status"])
        .uid(65534)
        .gid(65534));
    assert!(nobody.all().contains("missing API key"), "{}", nobody.all());

    let begun = Instant::now();
    assert_eq!(server.k8e(&["apikey", "delete", "ann"]).code, 0);
    let refused = ran(remote(&server, certs.path(), &ann).args(["sandbox", "status"]));
    assert!(
        refused.all().contains("invalid API key"),
        "{}",
        refused.all()
    );
    assert!(begun.elapsed() < Duration::from_secs(5));
    server.kill();
    server.restart();
    let refused = ran(remote(&server, certs.path(), &ann).args(["sandbox", "status"]));
    assert!(
        refused.all().contains("invalid API key"),
        "{}",
        refused.all()
    );
}

#[test]
fn with_trust_loopback_root_needs_no_key_on_this_machine() {
    let server = Server::start_with(&[&TCP[..], &["--trust-loopback"]].concat());
    let certs = cert_dir(&server);
    let call = |user: u32, args: &[&str]| {
        let mut command = remote(&server, certs.path(), "");
        ran(command.args(args).uid(user).gid(user))
    };
    let made = call(0, &["sandbox", "create"]);
    assert_eq!(made.json()["owner"], "local", "{}", made.all());
    let keys = call(0, &["apikey", "create", "x"]);
    assert_eq!(keys.json()["detail"], "denied", "{}", keys.all());
    let nobody = call(65534, &["sandbox", "status"]);
    assert!(nobody.all().contains("missing API key"), "{}", nobody.all());
    assert!(server.log_text().contains("--trust-loopback"));
}

#[test]
fn a_login_is_a_certificate_that_ends_with_its_key() {
    let mut server = Server::start_with(&TCP);
    let (certs, ann) = (cert_dir(&server), key(&server, "ann", &[]));
    let login = |server: &Server, key: &str| {
        let mut command = remote(server, certs.path(), key);
        ran(command.args(["login", "--device-name", "my laptop"]))
    };
    let logged_in = login(&server, &ann);
    assert_eq!(logged_in.json()["valid_days"], 90, "{}", logged_in.all());
    let private = certs.path().join("client.key");
    let mode = std::fs::metadata(private).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let status = |server: &Server| {
        let mut command = remote(server, certs.path(), "");
        ran(command.args(["sandbox", "create"]))
    };
    assert_eq!(status(&server).json()["owner"], "user:ann");
    // Renewed without the key.
    assert_eq!(login(&server, "").code, 0);
    assert_eq!(status(&server).json()["owner"], "user:ann");

    let logins: Vec<_> = audit(&server, &["--principal", "ann"])
        .into_iter()
        .filter(|row| row["action"] == "login")
        .collect();
    assert_eq!(logins.len(), 2);
    assert!(
        logins[0]["object"]
            .as_str()
            .unwrap()
            .ends_with(" my laptop")
    );

    // The one in use is the second.
    let serial = logins[1]["object"]
        .as_str()
        .unwrap()
        .split(' ')
        .next()
        .unwrap();
    assert_eq!(
        server.k8e(&["apikey", "revoke-certificate", serial]).code,
        0
    );
    assert!(status(&server).all().contains("has been revoked"));
    assert!(login(&server, "").all().contains("has been revoked"));
    assert_eq!(login(&server, &ann).code, 0, "the key still counts");
    assert_eq!(status(&server).code, 0);
    assert_eq!(server.k8e(&["apikey", "delete", "ann"]).code, 0);
    server.stop();
    server.restart();
    for refused in [status(&server), login(&server, "")] {
        assert!(
            refused.all().contains("has been revoked"),
            "{}",
            refused.all()
        );
    }
    assert!(login(&server, &ann).all().contains("invalid API key"));
}

#[test]
fn two_holders_do_not_see_each_other() {
    let server = Server::start_with(&TCP);
    let certs = cert_dir(&server);
    let (ann, bob) = (key(&server, "ann", &[]), key(&server, "bob", &[]));
    let laptop = key(&server, "ann-laptop", &["--principal", "ann"]);
    let made = ran(remote(&server, certs.path(), &ann).args(["sandbox", "create"])).json();
    let id = made["session_id"].as_str().unwrap();
    for args in [
        &["sandbox", "get", id][..],
        &["sandbox", "run", "id", "--session-id", id],
        &["sandbox", "exec", id, "--", "id"],
        &["sandbox", "read", id, "f"],
        &["sandbox", "write", id, "f"],
        &["sandbox", "list", id],
        &["sandbox", "ps", id],
        &["sandbox", "events", id],
        &["sandbox", "allow-hosts", "none", "--session-id", id],
        &["sandbox", "egress", id],
        &["sandbox", "destroy", id],
    ] {
        let hidden = ran(remote(&server, certs.path(), &bob).args(args));
        assert_eq!(hidden.code, 1, "{args:?}: {}", hidden.all());
        assert_eq!(
            hidden.json()["error"],
            format!("session {id} not found"),
            "{args:?}"
        );
    }
    let seen = ran(remote(&server, certs.path(), &laptop).args(["sandbox", "get", id]));
    assert_eq!(seen.json()["phase"], "active");
    let keys = ran(remote(&server, certs.path(), &ann).args(["apikey", "list"]));
    assert_eq!(keys.json()["detail"], "denied");
    let rows = ran(remote(&server, certs.path(), &ann).args(["audit"]));
    assert_eq!(rows.json()["detail"], "denied");
}

#[test]
fn the_audit_says_who_did_what() {
    let mut server = Server::start_with(&TCP);
    let (certs, ann) = (cert_dir(&server), key(&server, "ann", &[]));
    let session = server.session();
    let refused =
        ran(remote(&server, certs.path(), &ann).args(["sandbox", "destroy", &session.id]));
    assert_eq!(refused.code, 1);
    session.sh("true");
    session.destroy();
    let id = session.id.clone();
    server.stop();
    server.restart();
    let told: Vec<_> = audit(&server, &["--since", "1h"])
        .iter()
        .map(|row| {
            let text = |key: &str| row[key].as_str().unwrap().replace(&id, "ID");
            format!(
                "{} {} {} {}",
                text("principal"),
                text("action"),
                text("object"),
                text("code")
            )
        })
        .collect();
    let wanted = [
        "local key.create ann ok",
        "local session.create ID ok",
        "user:ann session.destroy ID not_found",
        "local run ID ok",
        "local session.destroy ID ok",
    ];
    assert_eq!(told, wanted);
    let rows = audit(&server, &["--limit", "4"]);
    let keys = server.k8e(&["apikey", "list"]).json();
    let root = (&Value::from(""), &Value::from("uid:0"));
    let anns = (&keys["keys"][0]["id"], &Value::from("127.0.0.1"));
    for (row, wanted) in rows.iter().zip([root, anns, root, root]) {
        assert_eq!((&row["key_id"], &row["source"]), wanted, "{row}");
    }
    assert_eq!(audit(&server, &["--limit", "1"]).len(), 1);
    assert_eq!(audit(&server, &["--principal", "local"]).len(), 4);
}

#[test]
fn who_calls_too_often_is_told_when_to_try_again() {
    let flags = [&TCP[..], &["--max-reads-per-second", "2"]].concat();
    let server = Server::start_with(&flags);
    let (certs, ann) = (cert_dir(&server), key(&server, "ann", &[]));
    let calls = (0..20).map(|_| {
        let mut command = remote(&server, certs.path(), &ann);
        ran(command.args(["sandbox", "sessions"]))
    });
    let refused = calls
        .into_iter()
        .find(|call| call.code != 0)
        .expect("one is too many");
    assert_eq!(refused.json()["detail"], "exhausted");
    assert!(refused.json()["retry_after_ms"].as_u64().unwrap() > 0);
    assert_eq!(server.k8e(&["sandbox", "sessions"]).code, 0);
}
