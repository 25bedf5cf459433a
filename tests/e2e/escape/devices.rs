//! Attempts on devices.

use super::{attempt, attempt_sh, everywhere};

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
