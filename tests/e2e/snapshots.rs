//! Snapshots of workspaces, on both runtimes: what is restored is what was saved, and nothing half-made is listed.

use k8e_e2e::{Server, Session};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Makes a tree with one of everything. Content is random, so that compression hides nothing.
const MAKE: &str = r#"
import os, random
random.seed(7)
for d in range(20):
    os.makedirs(f"tree/d{d}", exist_ok=True)
    for f in range(100):
        with open(f"tree/d{d}/f{f}", "wb") as out:
            out.write(random.randbytes(random.randrange(0, 9000)))
with open("big", "wb") as out:
    for _ in range(24):
        out.write(random.randbytes(1 << 20))
with open("sparse", "wb") as out:
    out.write(b"begin")
    out.seek(50 << 20)
    out.write(b"middle")
    out.truncate(90 << 20)
open("empty", "w").close()
open("locked", "w").write("x")
os.chmod("locked", 0o4000)
os.chown("tree/d1/f1", 1000, 1001)
os.link("tree/d0/f0", "second-name")
os.symlink("/etc/../nowhere", "link")
os.mkfifo("pipe", 0o640)
os.makedirs(b"odd \xff\n name/.hidden")
open(b"odd \xff\n name/.hidden/\xe2\x82", "w").write("odd")
os.makedirs("closed/in")
os.chmod("closed", 0o500)
try:
    os.setxattr("empty", "user.colour", b"blue\0green")
    os.setxattr("tree", "user.on-a-directory", b"yes")
except OSError as error:
    print("no xattrs:", error)
# By name: gVisor shows other times for what it has just written than a moment later.
for at, dirs, files in os.walk(b".", topdown=False):
    for name in files + [b"."]:
        os.utime(os.path.join(at, name), ns=(1, random.randrange(1 << 60)), follow_symlinks=False)
os.utime("empty", ns=(1, 1234567890123456789))
os.utime("link", ns=(1, 987654321098765432), follow_symlinks=False)
os.utime("tree/d5", ns=(1, 5_000_000_001))
"#;

/// Everything that a snapshot keeps, as one digest, with the list in a file outside the workspace.
const LOOK: &str = r#"
import os, hashlib, stat
lines, firsts = [], {}
def look(path):
    s = os.lstat(path)
    line = [repr(path), oct(s.st_mode), s.st_uid, s.st_gid, s.st_mtime_ns]
    if stat.S_ISREG(s.st_mode):
        data = hashlib.sha256()
        with open(path, "rb") as f:
            while part := f.read(1 << 20):
                data.update(part)
        line += [s.st_size, data.hexdigest(), s.st_nlink]
        if s.st_size > 10_000_000:
            line.append("holes" if s.st_blocks * 512 < s.st_size / 2 else "full")
        line.append(firsts.setdefault(s.st_ino, path) if s.st_nlink > 1 else "")
    if stat.S_ISLNK(s.st_mode):
        line.append(os.readlink(path))
    else:
        try:
            line += sorted((n, os.getxattr(path, n)) for n in os.listxattr(path))
        except OSError:
            pass
    lines.append(line)
    if stat.S_ISDIR(s.st_mode):
        for name in sorted(os.listdir(path)):
            look(os.path.join(path, name))
os.chdir("/workspace")
look(b".")
text = "\n".join(map(str, lines))
open("/tmp/look", "w").write(text)
print(len(lines), hashlib.sha256(text.encode()).hexdigest())
"#;

fn sandbox(server: &Server, words: &[&str]) -> Value {
    let ran = server.k8e(&[&["sandbox"], words].concat());
    assert_eq!(ran.code, 0, "{words:?}: {}", ran.all());
    ran.json()
}

fn refused(server: &Server, words: &[&str], text: &str) {
    let ran = server.k8e(&[&["sandbox"], words].concat());
    assert_eq!(ran.code, 1, "{}", ran.all());
    assert!(ran.out().contains(text), "{}", ran.all());
}

fn look(session: &Session<'_>) -> String {
    let ran = session.py(LOOK);
    assert_eq!(ran.code, 0, "{}", ran.all());
    ran.out()
}

fn listed(server: &Server) -> Vec<String> {
    let answer = sandbox(server, &["snapshot", "list"]);
    let listed = answer["snapshots"].as_array().unwrap().iter();
    listed
        .map(|snapshot| snapshot["name"].as_str().unwrap().to_owned())
        .collect()
}

/// Files of the chunk store.
fn stored(server: &Server) -> Vec<String> {
    let mut found = Vec::new();
    let mut dirs = vec![server.data_dir().join("store/snapshots")];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            match entry.path().is_dir() {
                true => dirs.push(entry.path()),
                false => found.push(entry.file_name().to_string_lossy().into_owned()),
            }
        }
    }
    found
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn what_is_restored_is_what_was_saved(runtime: &str) {
    let server = Server::start_with(&["--default-runtime", runtime]);
    let session = server.session();
    let id = session.id.clone();
    let made = session.py(MAKE);
    assert_eq!(made.code, 0, "{}", made.all());
    // gVisor writes times that it caches back later, at the latest for the snapshot.
    assert_eq!(session.sh("sync").code, 0);
    let counter = "n=0; while :; do n=$((n+1)); echo $n > /tmp/n.new; mv /tmp/n.new /tmp/n; done";
    sandbox(
        &server,
        &["run", "--background", "--session-id", &id, counter],
    );
    let before = look(&session);
    let listing = session.sh("cat /tmp/look").out();

    let saved = sandbox(&server, &["snapshot", "save", &id, "one"]);
    assert_eq!(saved["ok"], true, "{saved}");
    assert!(saved["stopped_ms"].as_f64().unwrap() > 0.0, "{saved}");
    assert_eq!(saved["file_count"], 2005, "{saved}");
    assert_eq!(listed(&server), ["one"]);
    let whole = saved["added_bytes"].as_u64().unwrap();
    assert!(
        (30_000_000..40_000_000).contains(&whole),
        "holes are not stored: {saved}"
    );
    refused(&server, &["snapshot", "save", &id, "one"], "exists already");
    assert_eq!(look(&session), before, "saving changes nothing");

    // One of a hundred files changed: no more than three of a hundred bytes are stored.
    let change = "for d in 0 3 6 9 12 15 18; do for f in 1 2 3; do head -c 5000 /dev/urandom > tree/d$d/f$f; \
                  touch -d @1700000000.123456789 tree/d$d/f$f; done; done";
    assert_eq!(session.sh(change).code, 0);
    let changed = look(&session);
    let again = sandbox(&server, &["snapshot", "save", &id, "two"]);
    let added = again["added_bytes"].as_u64().unwrap();
    assert!(added * 100 <= whole * 3, "{added} of {whole}: {again}");

    // Back, in the same session, whose processes go on.
    assert_eq!(
        session.sh("rm -rf big tree/d7 pipe; echo new > other").code,
        0
    );
    let count = || {
        session
            .sh("cat /tmp/n")
            .out()
            .trim()
            .parse::<u64>()
            .unwrap_or(0)
    };
    sandbox(&server, &["snapshot", "restore", "one", "--session", &id]);
    let after = look(&session);
    let now = session.sh("cat /tmp/look").out();
    assert_eq!(after, before, "{}", difference(&listing, &now));
    let counted = count();
    until("processes go on", || count() > counted);
    // And in a new one.
    let new = sandbox(&server, &["snapshot", "restore", "two"]);
    assert_eq!(new["restored_from"], "two", "{new}");
    let new = Session {
        server: &server,
        id: new["session_id"].as_str().unwrap().to_owned(),
    };
    assert_eq!(look(&new), changed);

    archives(&server, &new, &changed);
    for name in ["one", "two", "copy"] {
        sandbox(&server, &["snapshot", "delete", name]);
    }
    refused(
        &server,
        &["snapshot", "show", "one"],
        "snapshot one not found",
    );
    assert_eq!(stored(&server), Vec::<String>::new(), "nothing is left");
}

/// The first line that differs.
fn difference(one: &str, other: &str) -> String {
    let mut lines = one.lines().zip(other.lines());
    let found = lines.find(|(a, b)| a != b);
    found.map_or_else(String::new, |(a, b)| format!("{a}\n{b}"))
}

fn archives(server: &Server, session: &Session<'_>, expected: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let archive = path("two.k8e");
    sandbox(server, &["snapshot", "export", "two", &archive]);
    refused(
        server,
        &["snapshot", "import", &archive],
        "snapshot two exists already",
    );
    sandbox(server, &["snapshot", "import", &archive, "--name", "copy"]);
    assert_eq!(session.sh("rm -rf /workspace/*").code, 0);
    sandbox(
        server,
        &["snapshot", "restore", "copy", "--session", &session.id],
    );
    assert_eq!(look(session), expected);

    let good = std::fs::read(&archive).unwrap();
    let tampered = path("tampered.k8e");
    for at in [3, 30, 2000, good.len() / 2, good.len() - 40, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&tampered, &bad).unwrap();
        let ran = server.k8e(&["sandbox", "snapshot", "import", &tampered, "--name", "bad"]);
        assert_eq!(ran.code, 1, "byte {at}: {}", ran.all());
    }
    std::fs::write(&tampered, &good[..good.len() - 100]).unwrap();
    refused(
        server,
        &["snapshot", "import", &tampered, "--name", "bad"],
        "the archive ends too early",
    );
    // Another server has another key; what is imported there as foreign is the same.
    let other = Server::start();
    refused(
        &other,
        &["snapshot", "import", &archive],
        "not exported by this server",
    );
    assert_eq!(listed(&other), Vec::<String>::new());
    until("nothing is left of it", || stored(&other).is_empty());
    sandbox(&other, &["snapshot", "import", &archive, "--foreign"]);
    assert_eq!(listed(&other), ["two"]);
    assert_eq!(listed(server), ["copy", "one", "two"]);
}

#[test]
fn what_is_restored_is_what_was_saved_native() {
    what_is_restored_is_what_was_saved("native");
}

#[test]
fn what_is_restored_is_what_was_saved_gvisor() {
    what_is_restored_is_what_was_saved("gvisor");
}

#[test]
fn a_restore_that_does_not_fit_loses_nothing() {
    let server = Server::start_with(&["--default-runtime", "native"]);
    let large = server.session_with(&["--disk", "256MiB"]);
    assert_eq!(large.sh("head -c 120M /dev/urandom > big").code, 0);
    sandbox(&server, &["snapshot", "save", &large.id, "large"]);
    let small = server.session_with(&["--disk", "96MiB"]);
    assert_eq!(
        small
            .sh("echo mine > kept; mkdir d; echo too > d/kept")
            .code,
        0
    );
    let before = look(&small);
    refused(
        &server,
        &["snapshot", "restore", "large", "--session", &small.id],
        "disk limit of the sandbox is reached",
    );
    until("what was restored so far is removed", || {
        small.sh("ls -A /workspace").out() == "d\nkept\n"
    });
    assert_eq!(small.sh("cat kept d/kept").out(), "mine\ntoo\n");
    // Its own time is another: something was made in it and removed.
    let below = |look: String| look.split(' ').next().map(str::to_owned);
    assert_eq!(below(look(&small)), below(before));
    // A new session is not left behind either.
    let sessions = server.session_ids().len();
    refused(
        &server,
        &["snapshot", "restore", "large", "--disk", "96MiB"],
        "disk limit of the sandbox is reached",
    );
    assert_eq!(server.session_ids().len(), sessions);
}

#[test]
fn quotas_are_kept_and_a_full_one_leaves_nothing() {
    let flags = [
        "--default-runtime",
        "native",
        "--snapshot-disk-per-owner",
        "8MiB",
    ];
    let server = Server::start_with(&[&flags[..], &["--max-snapshots-per-owner", "2"]].concat());
    let session = server.session();
    assert_eq!(session.sh("head -c 3M /dev/urandom > a").code, 0);
    sandbox(&server, &["snapshot", "save", &session.id, "a"]);
    let before = stored(&server).len();
    assert_eq!(session.sh("head -c 30M /dev/urandom > b").code, 0);
    refused(
        &server,
        &["snapshot", "save", &session.id, "b"],
        "your snapshots may take 8 MiB",
    );
    until("what did not fit is removed", || {
        stored(&server).len() == before
    });
    assert_eq!(session.sh("rm b").code, 0);
    sandbox(&server, &["snapshot", "save", &session.id, "b"]);
    refused(
        &server,
        &["snapshot", "save", &session.id, "c"],
        "you have 2 snapshots",
    );
    assert_eq!(listed(&server), ["a", "b"]);
}

/// Saves in the background until the server is killed.
fn saves(server: &Server, id: &str, round: usize) -> std::process::Child {
    let name = format!("r{round}");
    let mut save = server.command(&["sandbox", "snapshot", "save", id, &name]);
    save.stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn nothing_half_made_is_listed_after_kill_9() {
    let mut server = Server::start_with(&["--default-runtime", "native"]);
    let id = server.session_with(&["--idle-timeout", "never"]).id;
    for round in 0..8 {
        let session = Session {
            server: &server,
            id: id.clone(),
        };
        let fill = format!("head -c 40M /dev/urandom > f{}", round % 2);
        assert_eq!(session.sh(&fill).code, 0);
        let mut saving = saves(&server, &id, round);
        // At another moment in each round: before, in the middle and after.
        std::thread::sleep(Duration::from_millis(40 * round as u64));
        server.kill();
        saving.wait().unwrap();
        server.restart();
        verify(&server, round);
    }
}

/// What is listed can be exported, which checks every chunk, and nothing else is on disk.
fn verify(server: &Server, round: usize) {
    until("leftovers are removed", || {
        !stored(server)
            .iter()
            .any(|name| name.starts_with("tmp-") || name == "dirty")
    });
    let names = listed(server);
    let dir = tempfile::tempdir().unwrap();
    for name in &names {
        let file = dir.path().join(name);
        sandbox(server, &["snapshot", "export", name, path(&file)]);
        std::fs::remove_file(file).unwrap();
    }
    let roots = stored(server)
        .iter()
        .filter(|name| name.ends_with(".root"))
        .count();
    assert_eq!(roots, names.len(), "round {round}: {names:?}");
    // Room for the next rounds.
    for name in names.iter().rev().skip(2) {
        sandbox(server, &["snapshot", "delete", name]);
    }
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}
