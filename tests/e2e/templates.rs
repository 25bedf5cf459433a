//! Templates: images from a real registry and from archives, as root file systems of sessions.
//!
//! The peers are Debian's: docker-registry, skopeo and umoci; the image is made by mmdebstrap
//! (`cargo xtask setup`).

use k8e_e2e::{Server, Session, tools};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A registry answers in a moment; on a machine that runs other tests as well in some.
const REGISTRY_WAIT: Duration = Duration::from_secs(60);

const BOTH: [&str; 2] = ["native", "gvisor"];

/// A registry on loopback, with an image.
struct Registry {
    process: Child,
    authority: String,
    _dir: tempfile::TempDir,
}

impl Registry {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let authority = format!("localhost:{port}");
        let config = dir.path().join("config.yml");
        let root = dir.path().join("data");
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n",
            root.display()
        );
        fs::write(&config, text).unwrap();
        let process = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("docker-registry: install it with `cargo xtask setup`");
        let started = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(
                started.elapsed() < REGISTRY_WAIT,
                "the registry does not answer"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Self {
            process,
            authority,
            _dir: dir,
        }
    }

    fn push(&self, layout: &Layout, name: &str) -> String {
        let reference = format!("{}/{name}", self.authority);
        done(
            Command::new("skopeo")
                .args([
                    "--insecure-policy",
                    "copy",
                    "--quiet",
                    "--dest-tls-verify=false",
                ])
                .arg(format!("oci:{}", layout.image()))
                .arg(format!("docker://{reference}")),
        );
        reference
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// An image in an OCI layout, which may get more layers.
struct Layout {
    dir: tempfile::TempDir,
}

impl Layout {
    /// Debian with Python.
    fn python() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("layout");
        done(
            Command::new("cp")
                .arg("-a")
                .arg(tools("images/python"))
                .arg(&to),
        );
        Self { dir }
    }

    /// No layer yet.
    fn empty() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let layout = Self { dir };
        let to = layout.dir.path().join("layout");
        done(Command::new("umoci").args(["init", "--layout"]).arg(to));
        done(Command::new("umoci").args(["new", "--image", &layout.image()]));
        layout
    }

    fn image(&self) -> String {
        format!("{}:python", self.dir.path().join("layout").display())
    }

    fn source(&self) -> String {
        format!("oci:{}", self.image())
    }

    /// Adds what a shell script makes in an empty directory, as one layer.
    fn layer(&self, script: &str) -> &Self {
        let files = tempfile::tempdir().unwrap();
        done(
            Command::new("sh")
                .args(["-ec", script])
                .current_dir(files.path()),
        );
        let tar = self.dir.path().join("layer.tar");
        done(
            Command::new("tar")
                .args([
                    "--xattrs",
                    "--sparse",
                    "--format=pax",
                    "--numeric-owner",
                    "-cf",
                ])
                .arg(&tar)
                .args(["-C"])
                .arg(files.path())
                .arg("."),
        );
        self.raw_layer(&tar)
    }

    fn raw_layer(&self, tar: &Path) -> &Self {
        let image = self.image();
        done(
            Command::new("umoci")
                .args(["raw", "add-layer", "--image", &image])
                .arg(tar),
        );
        self
    }

    fn config(&self, flags: &[&str]) -> &Self {
        done(
            Command::new("umoci")
                .args(["config", "--image", &self.image()])
                .args(flags),
        );
        self
    }
}

#[track_caller]
fn done(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}: {said}");
}

#[track_caller]
fn create(server: &Server, name: &str, from: &str) -> Value {
    let made = server.k8e(&["template", "create", name, "--from", from]);
    assert_eq!(made.code, 0, "{}\n{}", made.all(), server.log_text());
    made.json()
}

#[track_caller]
fn says(session: &Session<'_>, script: &str, want: &str) {
    let ran = session.sh(script);
    assert_eq!(
        (ran.code, ran.out().as_str()),
        (0, want),
        "{script}: {}",
        ran.all()
    );
}

/// Names of layers on the server's disk, with what is half made.
fn layers(server: &Server) -> Vec<String> {
    let entries = fs::read_dir(server.data_dir().join("layers")).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn an_image_of_a_registry_is_the_root_of_sessions() {
    let registry = Registry::start();
    let layout = Layout::python();
    layout
        .layer(
            "mkdir -p etc opt/x srv/data usr/share/doc
             touch etc/.wh.debian_version usr/share/doc/.wh..wh..opq
             echo only > usr/share/doc/only; echo one > opt/x/a; ln opt/x/a opt/x/b
             python3 -c 'import os; os.setxattr(\"opt/x/a\", \"user.note\", b\"hello\")'
             truncate -s 8M opt/x/sparse; chown 1000:1001 srv/data; chmod 4755 opt/x/b
             touch -d @1000000000 opt/x/sparse",
        )
        .config(&[
            "--config.env",
            "GREETING=hello",
            "--config.workingdir",
            "/srv",
        ])
        .config(&["--config.entrypoint", "/bin/sh", "--config.cmd", "-c"])
        .config(&["--config.cmd", "echo ready; sleep 1000"]);
    let reference = registry.push(&layout, "team/py:1");
    let server = Server::start_with(&["--registry-insecure", &registry.authority]);
    // The name reads like an image: it is fetched.
    let ran = server.k8e(&[
        "sandbox",
        "run",
        "import sys; print(sys.prefix)",
        "--lang",
        "python",
        "--raw",
        "--template",
        &reference,
    ]);
    assert_eq!(
        (ran.code, ran.out().as_str()),
        (0, "/usr\n"),
        "{}\n{}",
        ran.all(),
        server.log_text()
    );
    let shown = server.k8e(&["template", "show", &reference]).json();
    assert_eq!(shown["layers"].as_array().unwrap().len(), 2, "{shown}");
    assert_eq!(
        (shown["workdir"].as_str(), shown["sessions"].as_u64()),
        (Some("/srv"), Some(1)),
        "{shown}"
    );
    for runtime in BOTH {
        let session = server.session_with(&["--template", &reference, "--runtime", runtime]);
        says(
            &session,
            "test ! -e /etc/debian_version && ls /usr/share/doc",
            "only\n",
        );
        says(
            &session,
            "stat -c '%h %a' /opt/x/a; stat -c %i /opt/x/b | grep -q $(stat -c %i /opt/x/a) && cat /opt/x/b",
            "2 4755\none\n",
        );
        says(
            &session,
            "stat -c '%u %g' /srv/data; stat -c '%u:%g' /bin/sh /",
            "1000 1001\n0:0\n0:0\n",
        );
        says(
            &session,
            "stat -c '%s %Y' /opt/x/sparse",
            "8388608 1000000000\n",
        );
        says(&session, "pwd; echo $GREETING; id -u", "/srv\nhello\n0\n");
        says(
            &session,
            "cd /workspace && touch x && ls; grep -c nameserver /etc/resolv.conf",
            "x\n1\n",
        );
        // What is below is read-only to it, and its own copy is its own.
        says(
            &session,
            "echo more >> /opt/x/a; rm -r /usr/share/doc; mkdir /usr/share/doc; ls /usr/share/doc; cat /opt/x/a",
            "one\nmore\n",
        );
        let note = session.py("import os; print(os.getxattr('/opt/x/b', 'user.note').decode())");
        if runtime == "native" {
            assert_eq!(note.out(), "hello\n", "{}", note.all());
        }
        let env = session.run(
            &["--env", "GREETING=mine", "--workdir", "/tmp"],
            "pwd; echo $GREETING",
        );
        assert_eq!(env.out(), "/tmp\nmine\n", "{}", env.all());
        session.destroy();
    }
    // Files on the host's disk belong to nobody that the host has.
    let layers_dir = server.data_dir().join("layers");
    for layer in layers(&server) {
        let meta = fs::metadata(layers_dir.join(&layer).join("fs")).unwrap();
        assert!(meta.uid() >= 0x7fff_0000, "{layer}");
    }
    // The entry point runs only when it is asked for.
    let session = server.session_with(&["--template", &reference, "--entrypoint"]);
    let runs = server.k8e(&["sandbox", "runs", &session.id]).json();
    assert_eq!(runs["runs"].as_array().unwrap().len(), 1, "{runs}");
    session.destroy();
}

#[test]
fn layers_are_shared_kept_while_needed_and_then_removed() {
    let mut server = Server::start();
    let base = Layout::python();
    let first = create(&server, "first", &base.source());
    base.layer("mkdir etc; echo second > etc/issue");
    let second = create(&server, "second", &base.source());
    assert_eq!(first["layers"][0], second["layers"][0]);
    assert_eq!(layers(&server).len(), 2, "one is shared");
    let one = server.session_with(&["--template", "first"]);
    let two = server.session_with(&["--template", "second", "--runtime", "gvisor"]);
    let id = one.id.clone();
    says(&two, "cat /etc/issue", "second\n");
    let refused = server.k8e(&["template", "delete", "first"]);
    assert_ne!(refused.code, 0);
    assert!(
        refused.all().contains("used by 1 sessions"),
        "{}",
        refused.all()
    );
    // A name that is given to another image changes no session.
    let fixed = one.server.k8e(&["sandbox", "get", &id]).json()["template"].clone();
    create(
        &server,
        "first",
        &base.layer("mkdir etc; echo third > etc/issue").source(),
    );
    assert_eq!(
        server.k8e(&["sandbox", "get", &id]).json()["template"],
        fixed
    );
    assert!(!one.sh("cat /etc/issue").out().contains("third"));
    two.destroy();
    assert_eq!(server.k8e(&["template", "delete", "second"]).code, 0);
    assert_eq!(layers(&server).len(), 3, "the new first has all of them");
    // All of that after a restart, too.
    server.kill();
    server.restart();
    let ran = server.k8e(&[
        "sandbox",
        "run",
        "--raw",
        "--session-id",
        &id,
        "python3 -c 'print(1)'",
    ]);
    assert_eq!(ran.out(), "1\n", "{}", ran.all());
    let listed = server.k8e(&["template", "list"]).json();
    assert_eq!(listed["templates"].as_array().unwrap().len(), 1, "{listed}");
    assert_eq!(server.k8e(&["sandbox", "destroy", &id]).code, 0);
    assert_eq!(server.k8e(&["template", "delete", "first"]).code, 0);
    assert_eq!(layers(&server), Vec::<String>::new());
    let gone = server.k8e(&["sandbox", "create", "--template", "first"]);
    assert!(
        gone.all().contains("template first is not known here"),
        "{}",
        gone.all()
    );
    server.assert_traces(0);
}

#[test]
fn what_is_no_image_is_refused_and_leaves_nothing() {
    let server = Server::start();
    let refused = |layout: &Layout, says: &str| {
        let made = server.k8e(&["template", "create", "bad", "--from", &layout.source()]);
        assert_ne!(made.code, 0, "{}", made.all());
        assert!(made.all().contains(says), "{}", made.all());
        assert_eq!(
            server.k8e(&["template", "list"]).json()["templates"],
            Value::Array(vec![])
        );
    };
    let made = |script: &str| {
        let layout = Layout::empty();
        layout.layer(script);
        layout
    };
    refused(&made("mkdir etc; mknod etc/disk b 8 0"), "device node");
    refused(&made("mkdir a; touch a/x; chown 70000 a/x"), "65535");
    let tar = |python: &str| {
        let layout = Layout::empty();
        let file = layout.dir.path().join("bad.tar");
        let script = format!(
            "import tarfile, sys, io\nt = tarfile.open(sys.argv[1], 'w')\ndef add(name, **more):\n  i = tarfile.TarInfo(name)\n  [setattr(i, k, v) for k, v in more.items()]\n  t.addfile(i, io.BytesIO(b'x' * i.size))\n{python}\nt.close()"
        );
        done(Command::new("python3").args(["-c", &script]).arg(&file));
        layout.raw_layer(&file);
        layout
    };
    refused(&tar("add('../../escaped', size=1)"), "..");
    refused(
        &tar("add('a', type=b'2', linkname='/etc'); add('a/escaped', size=1)"),
        "symbolic link",
    );
    refused(
        &tar("add('x', type=b'1', linkname='/etc/shadow')"),
        "hard link",
    );
    // A configuration that names another layer than the one that is there.
    let liar = made("echo one > file");
    let blobs = liar.dir.path().join("layout/blobs/sha256");
    let script = "import json, hashlib, sys, os
d = sys.argv[1]; index = json.load(open(d + '/index.json')); b = d + '/blobs/sha256/'
m = json.load(open(b + index['manifests'][0]['digest'][7:]))
c = json.load(open(b + m['config']['digest'][7:])); c['rootfs']['diff_ids'] = ['sha256:' + '0' * 64]
def put(value):
  data = json.dumps(value).encode(); digest = hashlib.sha256(data).hexdigest()
  open(b + digest, 'wb').write(data); return 'sha256:' + digest, len(data)
m['config']['digest'], m['config']['size'] = put(c)
index['manifests'][0]['digest'], index['manifests'][0]['size'] = put(m)
json.dump(index, open(d + '/index.json', 'w'))";
    done(
        Command::new("python3")
            .args(["-c", script])
            .arg(liar.dir.path().join("layout")),
    );
    refused(&liar, "when uncompressed, not sha256:000");
    // A layer whose bytes are others than its digest says.
    let damaged = made("echo two > file");
    let largest = fs::read_dir(damaged.dir.path().join("layout/blobs/sha256")).unwrap();
    for entry in largest {
        let path = entry.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        if bytes.starts_with(&[0x1f, 0x8b]) {
            bytes[12] ^= 1;
            fs::write(&path, bytes).unwrap();
        }
    }
    refused(&damaged, "has digest sha256:");
    assert!(blobs.exists() && !Path::new("/escaped").exists());
    assert_eq!(layers(&server), Vec::<String>::new());
    let closed = server.k8e(&["template", "create", "x", "--from", "localhost:1/x"]);
    assert!(
        closed.all().contains("not a public address"),
        "{}",
        closed.all()
    );
    let unknown = server.k8e(&["sandbox", "create", "--template", "nothing"]);
    assert!(
        unknown.all().contains("template nothing is not known here"),
        "{}",
        unknown.all()
    );
}

#[test]
fn an_image_without_a_shell_says_so() {
    let server = Server::start();
    let layout = Layout::empty();
    layout.layer("mkdir -p bin; cp \"$(command -v busybox)\" bin/busybox");
    create(&server, "tiny", &layout.source());
    let session = server.session_with(&["--template", "tiny"]);
    let ran = session.sh("echo hi");
    assert!(
        ran.all().contains("the image does not have it"),
        "{}",
        ran.all()
    );
    let ran = server.k8e(&[
        "sandbox",
        "exec",
        &session.id,
        "--",
        "/bin/busybox",
        "--help",
    ]);
    assert!(ran.all().contains("BusyBox"), "{}", ran.all());
    session.destroy();
}

#[test]
fn kill_9_in_the_middle_of_a_fetch_leaves_nothing_listed() {
    let registry = Registry::start();
    let reference = registry.push(&Layout::python(), "py:1");
    let mut server = Server::start_with(&["--registry-insecure", &registry.authority]);
    for round in 0..3_u64 {
        let mut creating = server
            .command(&["template", "create", "py", "--from", &reference])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Bytes are being stored, or files unpacked.
        let began = Instant::now();
        while layers(&server).is_empty() && began.elapsed() < Duration::from_secs(2 * round) {
            std::thread::sleep(Duration::from_millis(10));
        }
        server.kill();
        creating.wait().unwrap();
        server.restart();
        let listed = server.k8e(&["template", "list"]).json();
        assert_eq!(listed["templates"], Value::Array(vec![]), "round {round}");
        assert_eq!(
            fs::read_dir(server.data_dir().join("store/blobs")).map_or(0, Iterator::count),
            0
        );
    }
    create(&server, "py", &reference);
    let names = layers(&server);
    assert_eq!(names.len(), 1, "{names:?}");
    let session = server.session_with(&["--template", "py"]);
    says(&session, "python3 -c 'print(2)'", "2\n");
    session.destroy();
}

/// What a script of an image that has busybox only says.
#[track_caller]
fn busybox(server: &Server, session: &Session<'_>, script: &str) -> String {
    let line = ["/bin/busybox", "sh", "-c", script];
    let exec = ["sandbox", "exec", &session.id, "--raw", "--"];
    let ran = server.k8e(&[&exec[..], &line].concat());
    assert_eq!(ran.code, 0, "{script}: {}", ran.all());
    ran.out()
}

const BUSYBOX: &str = "mkdir bin; cp \"$(command -v busybox)\" bin/busybox";

#[test]
fn a_layer_that_is_there_twice_or_hides_all_below_is_shown_so() {
    let server = Server::start();
    let twice = Layout::empty();
    twice.layer(&format!("{BUSYBOX}; echo one > a"));
    let first = twice.dir.path().join("first.tar");
    fs::rename(twice.dir.path().join("layer.tar"), &first).unwrap();
    twice.layer("touch .wh.a; echo two > b").raw_layer(&first);
    create(&server, "twice", &twice.source());
    let opaque = Layout::empty();
    opaque.layer("echo below > secret; mkdir etc; echo below > etc/secret");
    opaque.layer(&format!("touch .wh..wh..opq; {BUSYBOX}; echo three > c"));
    create(&server, "opaque", &opaque.source());
    for runtime in BOTH {
        let made = |template| server.session_with(&["--template", template, "--runtime", runtime]);
        let session = made("twice");
        let said = busybox(&server, &session, "/bin/busybox cat /a /b");
        assert_eq!(said, "one\ntwo\n", "{runtime}");
        session.destroy();
        let session = made("opaque");
        let script =
            "/bin/busybox cat /c; /bin/busybox ls /secret /etc/secret 2>/dev/null || echo gone";
        assert_eq!(
            busybox(&server, &session, script),
            "three\ngone\n",
            "{runtime}"
        );
        session.destroy();
    }
}

#[test]
fn a_directory_and_a_compressed_archive_are_sources_too() {
    let server = Server::start();
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "{BUSYBOX}; mkdir -p etc srv; echo hello > etc/note; ln etc/note etc/same; ln -s etc/note link
         chown 1000:1001 srv; chmod 2750 srv; truncate -s 4M srv/sparse"
    );
    let mut made = Command::new("sh");
    done(made.args(["-ec", &script]).current_dir(dir.path()));
    create(&server, "dir", &format!("dir:{}", dir.path().display()));
    let layout = Layout::empty();
    layout.layer(&script);
    let archive = dir.path().join("saved.tar");
    let mut copy = Command::new("skopeo");
    let copy = copy.args(["--insecure-policy", "copy", "--quiet", &layout.source()]);
    done(copy.arg(format!("docker-archive:{}:app:1", archive.display())));
    done(Command::new("gzip").arg(&archive));
    let from = format!("docker-archive:{}.gz", archive.display());
    create(&server, "saved", &from);
    for template in ["dir", "saved"] {
        let session = server.session_with(&["--template", template]);
        let script =
            "cd /; b=/bin/busybox; $b cat link; $b stat -c '%h' etc/note; $b stat -c '%u %g %a' srv
             $b stat -c '%s' srv/sparse";
        assert_eq!(
            busybox(&server, &session, script),
            "hello\n2\n1000 1001 2750\n4194304\n",
            "{template}"
        );
        session.destroy();
    }
    let bad = server.k8e(&["template", "create", "x", "--from", "dir:/no/such/place"]);
    assert!(
        bad.code != 0 && bad.all().contains("/no/such/place"),
        "{}",
        bad.all()
    );
}

#[test]
fn a_deep_directory_is_replaced_by_a_later_entry() {
    let server = Server::start();
    let layout = Layout::empty();
    let tar = layout.dir.path().join("deep.tar");
    let script = "import tarfile, sys
t = tarfile.open(sys.argv[1], 'w')
i = tarfile.TarInfo('/'.join('d' * 120)); i.type = tarfile.DIRTYPE; t.addfile(i)
t.addfile(tarfile.TarInfo('d')); t.close()";
    done(Command::new("python3").args(["-c", script]).arg(&tar));
    layout.raw_layer(&tar);
    create(&server, "deep", &layout.source());
    let name = layers(&server).remove(0);
    let file = server.data_dir().join("layers").join(name).join("fs/d");
    assert!(fs::symlink_metadata(file).unwrap().is_file());
}
