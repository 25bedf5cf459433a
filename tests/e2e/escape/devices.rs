//! Attempts on devices.

use super::{attempt, attempt_in, attempt_sh, everywhere};
use k8e_e2e::{Server, Session};
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn make_a_disk_node() {
    attempt(
        r#"
import stat
for kind in (stat.S_IFBLK, stat.S_IFCHR):
    for dev in (os.makedev(8, 0), os.makedev(254, 0), os.makedev(259, 0), os.makedev(7, 0), os.makedev(1, 1), os.makedev(10, 237)):
        for place in ("/tmp/node", "/dev/node", "/workspace/node", "/dev/shm/node"):
            print("tried", place)
            try:
                os.mknod(place, kind | 0o600, dev)
                print("ESCAPED", place, dev)
            except OSError: pass
"#,
    );
}

#[test]
fn find_a_raw_disk() {
    attempt(
        r#"
import stat
print("tried")
safe = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)}
for root, dirs, files in os.walk("/dev"):
    for name in files:
        info = os.lstat(os.path.join(root, name))
        if stat.S_ISBLK(info.st_mode): print("ESCAPED", root, name)
        if stat.S_ISCHR(info.st_mode) and (os.major(info.st_rdev), os.minor(info.st_rdev)) not in safe and os.major(info.st_rdev) != 136:
            print("ESCAPED", root, name, info.st_rdev)
"#,
    );
}

#[test]
fn open_the_machines_special_devices() {
    attempt_sh(
        "echo tried; for d in kvm fuse loop-control loop0 vda sda mem kmsg net/tun vsock vhost-net userfaultfd snapshot; do [ -e /dev/$d ] && echo ESCAPED $d; done; true",
    );
}

#[test]
fn type_into_a_terminal() {
    // The classic way out of a shared terminal: TIOCSTI.
    everywhere(
        r#"
import fcntl, pty
main, other = pty.openpty()
print("tried")
try:
    fcntl.ioctl(other, 0x5412, b"x")
    print("ESCAPED")
except OSError as e:
    print(e)
"#,
    );
}

#[test]
fn open_a_device_that_somebody_left() {
    // Whatever made the nodes: they are on a file system that is mounted `nodev`.
    let server = Server::start();
    let session = server.session();
    leave_nodes(&from_outside(&session, "61.9081").join("workspace"));
    attempt_in(&session, OPEN_NODES);
}

#[test]
fn open_a_device_that_somebody_left_where_devices_work() {
    // /dev is the one place that is not mounted `nodev`: here the control group has to say no.
    let server = Server::start();
    let session = server.session();
    let dev = from_outside(&session, "61.9082").join("dev");
    leave_nodes(&dev);
    make_node(&dev.join("node-null"), ["c", "1", "3"]);
    let ran = session.sh("echo works > /dev/node-null && echo ok");
    assert_eq!(ran.out(), "ok\n", "nodes work here: {}", ran.all());
    attempt_in(&session, OPEN_NODES);
}

const OPEN_NODES: &str = r#"
import glob
for path in glob.glob("/workspace/node-[bc]-*") + glob.glob("/dev/node-[bc]-*"):
    print("tried", path)
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        try:
            os.open(path, flags | os.O_NONBLOCK); print("ESCAPED", path)
        except OSError: pass
"#;

/// The root of a native sandbox, as the host's root gets at it: by a process that sleeps for `mark` seconds.
fn from_outside(session: &Session<'_>, mark: &str) -> PathBuf {
    let ran = session.sh(&format!(
        "sleep {mark} & until grep -q sleep /proc/$!/comm; do :; done"
    ));
    assert_eq!(ran.code, 0, "{}", ran.all());
    let found = Command::new("pgrep")
        .args(["-fx", &format!("sleep {mark}")])
        .output();
    let found = String::from_utf8(found.expect("pgrep runs").stdout).unwrap();
    Path::new("/proc").join(found.trim()).join("root")
}

/// loop-control, the first loop device, the machine's memory, its console, and KVM.
fn leave_nodes(dir: &Path) {
    for (kind, major, minor) in [
        ("c", "10", "237"),
        ("b", "7", "0"),
        ("c", "1", "1"),
        ("c", "5", "1"),
        ("c", "10", "232"),
    ] {
        make_node(
            &dir.join(format!("node-{kind}-{major}-{minor}")),
            [kind, major, minor],
        );
    }
}

fn make_node(path: &Path, numbers: [&str; 3]) {
    let made = Command::new("mknod")
        .args(["-m", "666"])
        .arg(path)
        .args(numbers)
        .status();
    assert!(made.unwrap().success(), "{}", path.display());
}

#[test]
fn use_what_devices_it_has() {
    // Not an escape: the safe ones work.
    let server = Server::start();
    let ran = server.session().py(
        "import os, pty\n\
         for name in ('null', 'zero', 'full', 'random', 'urandom'): open('/dev/' + name, 'rb').read(1)\n\
         main, other = pty.openpty(); os.write(main, b'x'); os.open(os.ttyname(other), os.O_RDWR | os.O_NOCTTY); print('ok')",
    );
    assert_eq!(ran.out(), "ok\n", "{}", ran.all());
}
