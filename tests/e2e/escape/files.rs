//! Attempts on the host's files.

use super::{attempt, attempt_in, attempt_sh, everywhere_sh};
use k8e_e2e::Server;
use std::time::{Duration, Instant};

#[test]
fn read_the_hosts_passwords() {
    everywhere_sh(
        "echo tried; cat /etc/shadow /etc/gshadow /etc/sudoers 2>/dev/null | grep -q . && echo ESCAPED; true",
    );
}

#[test]
fn see_the_homes_of_the_host() {
    let marker = tempfile::Builder::new()
        .prefix("k8e-escape-")
        .tempfile_in("/root")
        .unwrap();
    let name = marker
        .path()
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned();
    everywhere_sh(&format!(
        "echo tried; ls -A /root /home/* | grep -q {name} && echo ESCAPED; [ -z \"$(ls -A /root | grep -vx .npmrc)\" ] || echo ESCAPED"
    ));
}

#[test]
fn see_the_hosts_var_and_tmp() {
    let marker = tempfile::Builder::new()
        .prefix("k8e-escape-")
        .tempfile_in("/tmp")
        .unwrap();
    let name = marker
        .path()
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned();
    everywhere_sh(&format!(
        "echo tried; find / -xdev -name '{name}' 2>/dev/null | grep -q . && echo ESCAPED
         for dir in /var/lib/dpkg /var/lib/apt /var/log/apt /boot /srv/* /mnt/*; do [ -e $dir ] && echo ESCAPED $dir; done; true"
    ));
}

#[test]
fn see_the_data_directory() {
    let server = Server::start();
    let session = server.session();
    let dir = server.data_dir();
    let ran = session.sh(&format!("echo tried; ls {} 2>/dev/null && echo ESCAPED; find / -xdev -name 'guest.sock' -o -xdev -name '*.img' 2>/dev/null | grep -v ^/usr | grep -q . && echo ESCAPED; true", dir.display()));
    assert!(
        ran.out().contains("tried") && !ran.out().contains("ESCAPED"),
        "{}",
        ran.all()
    );
}

#[test]
fn leave_through_the_root_of_pid_1() {
    everywhere_sh(
        "echo tried; ls /proc/1/root/ 2>/dev/null && echo ESCAPED; ls /proc/1/cwd/ 2>/dev/null && echo ESCAPED; ls /proc/*/root/etc/shadow 2>/dev/null && echo ESCAPED; true",
    );
}

#[test]
fn leave_by_dots_and_chroot() {
    attempt(
        r#"
print("tried")
os.mkdir("/tmp/jail")
old = os.open("/", os.O_RDONLY)
os.chroot("/tmp/jail")
os.fchdir(old)
for _ in range(64): os.chdir("..")
os.chroot(".")
if os.path.exists("/etc/shadow") or os.path.exists("/boot/grub") or set(os.listdir("/root")) - {".npmrc"}: print("ESCAPED", os.listdir("/"))
"#,
    );
}

#[test]
fn change_the_hosts_programs() {
    let server = Server::start();
    let session = server.session();
    let ran = session.sh("echo tried; echo evil > /usr/bin/k8e-escape-planted; rm -f /usr/bin/env; echo evil > /opt/k8e-escape-planted; ls /usr/bin/k8e-escape-planted");
    assert!(
        ran.out().contains("k8e-escape-planted"),
        "a sandbox may change its own /usr: {}",
        ran.all()
    );
    for path in ["/usr/bin/k8e-escape-planted", "/opt/k8e-escape-planted"] {
        assert!(
            !std::path::Path::new(path).exists(),
            "{path} reached the host"
        );
    }
    assert!(std::path::Path::new("/usr/bin/env").exists());
    let other = server.session();
    assert_eq!(
        other.sh("ls /usr/bin/k8e-escape-planted").code,
        2,
        "another sandbox sees it"
    );
}

#[test]
fn open_by_handle() {
    attempt(
        "refused(303, -100, b'/usr', (ctypes.c_char * 256)(128), (ctypes.c_char * 8)(), 0)\nrefused(304, -100, (ctypes.c_char * 256)(8), 0)",
    );
}

#[test]
fn find_descriptors_of_the_server() {
    attempt(
        r#"
print("tried")
allowed = ("/dev/null", "pipe:", "/workspace/", "/tmp/")
for fd in os.listdir("/proc/self/fd"):
    try: target = os.readlink("/proc/self/fd/" + fd)
    except OSError: continue
    if not target.startswith(allowed) and not target.startswith("/proc/"): print("ESCAPED", fd, target)
try: print("ESCAPED", os.listdir("/proc/1/fd"))
except PermissionError: pass
"#,
    );
}

#[test]
fn read_sys() {
    attempt_sh("echo tried; [ -z \"$(ls -A /sys)\" ] || echo ESCAPED");
}

#[test]
fn read_through_a_link_with_the_file_api() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(session.sh("ln -s /etc/passwd out; ln -s .. up; ln -s /proc/self/root/etc/passwd magic; mkdir d; ln -s ../../etc/passwd d/rel").code, 0);
    for path in [
        "out",
        "up/etc/passwd",
        "magic",
        "d/rel",
        "/workspace/up/etc/hosts",
    ] {
        let read = server.k8e(&["sandbox", "read", &session.id, path]);
        assert_eq!(read.code, 1, "{path}: {}", read.all());
        assert!(!read.out().contains("root:"), "{path}: {}", read.all());
        let written = server.k8e_with(&["sandbox", "write", &session.id, path], b"evil");
        assert_eq!(written.code, 1, "{path}: {}", written.all());
    }
    assert_eq!(session.sh("head -c 4 /etc/passwd").out(), "root");
}

#[test]
fn win_a_race_against_the_file_api() {
    let server = Server::start();
    let session = server.session();
    let script = r"
import os
os.makedirs('/workspace/real', exist_ok=True)
open('/workspace/real/f', 'w').write('inside')
while True:
    os.symlink('/etc', '/workspace/l'); os.rename('/workspace/l', '/workspace/swap')
    os.unlink('/workspace/swap'); os.symlink('real', '/workspace/swap')
    os.unlink('/workspace/swap')
";
    let ran = session.sh(&format!(
        "cat > /tmp/race.py <<'PY'{script}PY\nnohup python3 /tmp/race.py >/dev/null 2>&1 &"
    ));
    assert_eq!(ran.code, 0, "{}", ran.all());
    let end = Instant::now() + Duration::from_secs(4);
    let mut tries = 0;
    while Instant::now() < end {
        tries += 1;
        let read = server.k8e(&["sandbox", "read", "--raw", &session.id, "swap/passwd"]);
        assert!(
            !read.out().contains("root:"),
            "read out of the workspace after {tries} tries"
        );
        server.k8e_with(&["sandbox", "write", &session.id, "swap/k8e-planted"], b"x");
    }
    assert_eq!(
        session.sh("ls /etc/k8e-planted").code,
        2,
        "wrote out of the workspace"
    );
    assert!(!std::path::Path::new("/etc/k8e-planted").exists());
    assert!(tries > 3, "only {tries} tries");
}

#[test]
fn read_a_private_file_of_the_host_through_the_layers() {
    // /usr and /opt are shown with root inside as their owner: documented. Nothing else of the host is.
    let server = Server::start();
    attempt_in(
        &server.session(),
        r#"
print("tried")
shown = set(os.listdir("/"))
expected = {"bin","dev","etc","home","lib","lib32","lib64","libx32","libexec","mnt","opt","proc","root","run","sbin","srv","sys","tmp","usr","var","workspace"}
if shown - expected: print("ESCAPED", shown - expected)
"#,
    );
}

#[test]
fn put_the_data_directory_where_sandboxes_look() {
    let dir = tempfile::Builder::new()
        .prefix("k8e-")
        .tempdir_in("/opt")
        .unwrap();
    let data = dir.path().join("data");
    let server = std::process::Command::new(k8e_e2e::binary())
        .args(["server", "--listen", "none", "--data-dir"])
        .arg(&data)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&server.stderr).into_owned();
    assert!(
        !server.status.success() && said.contains("every sandbox can read"),
        "{said}"
    );
}

#[test]
fn learn_where_the_data_directory_is() {
    let server = Server::start();
    let dir = server.data_dir();
    attempt_in(
        &server.session(),
        &format!(
            r#"
print("tried")
for name in ("mountinfo", "mounts", "mountstats", "maps", "cgroup", "environ", "cmdline"):
    try:
        if {:?} in open("/proc/self/" + name).read(): print("ESCAPED", name)
    except OSError: pass
# Names of control groups have the sandbox's id.
if any(not line.strip().endswith(":/") for line in open("/proc/self/cgroup")): print("ESCAPED cgroup")
"#,
            dir.display().to_string()
        ),
    );
}

#[test]
fn replace_the_mount_points() {
    // What the server looks for inside a sandbox (/dev/shm) must stay what it is.
    attempt(
        r#"
print("tried")
for path in ("/dev/shm", "/dev", "/proc", "/workspace", "/dev/pts"):
    for act in (os.rmdir, lambda p: os.rename(p, p + "-moved"), lambda p: os.symlink("/proc", p), os.unlink):
        try:
            act(path); print("ESCAPED", path)
        except OSError: pass
"#,
    );
}
