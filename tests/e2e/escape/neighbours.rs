//! Attempts of one sandbox on another.

use k8e_e2e::Server;

#[test]
fn signal_and_see_a_neighbour() {
    let server = Server::start();
    let (victim, attacker) = (server.session(), server.session());
    victim.sh("sleep 300 & echo secret-of-victim > /workspace/secret; echo x > /tmp/secret; echo y > /dev/shm/secret");
    let ran = attacker.sh(
        "echo tried; kill -9 -1; true; pkill -9 sleep; ls /workspace/secret /tmp/secret /dev/shm/secret 2>/dev/null && echo ESCAPED
         grep -l 'sleep' /proc/[0-9]*/cmdline 2>/dev/null && echo ESCAPED; true",
    );
    assert!(!ran.out().contains("ESCAPED"), "{}", ran.all());
    let alive = victim.sh("pgrep sleep >/dev/null && cat /workspace/secret");
    assert_eq!(alive.out(), "secret-of-victim\n", "{}", alive.all());
    assert_eq!(attacker.sh("echo still here").out(), "still here\n");
}

#[test]
fn share_memory_with_a_neighbour() {
    let server = Server::start();
    let (a, b) = (server.session(), server.session());
    let make = "import ctypes; c = ctypes.CDLL(None); i = c.shmget(0x6b3865, 4096, 0o1666); print('made', i >= 0)";
    assert_eq!(a.py(make).out(), "made True\n");
    let find =
        "import ctypes; c = ctypes.CDLL(None); print('found', c.shmget(0x6b3865, 4096, 0) >= 0)";
    assert_eq!(b.py(find).out(), "found False\n");
    assert_eq!(a.py(find).out(), "found True\n");
}

#[test]
fn talk_to_a_neighbour() {
    let server = Server::start();
    let (a, b) = (server.session(), server.session());
    let serve = "import socket,time,os\ns=socket.create_server(('0.0.0.0',8099))\nu=socket.socket(socket.AF_UNIX);u.bind('\\0k8e-neighbour');u.listen()\nif os.fork(): os._exit(0)\ntime.sleep(60)";
    assert_eq!(a.py(serve).code, 0);
    let reach = "import socket\nfor make in (lambda: socket.create_connection(('127.0.0.1',8099),2), lambda: socket.socket(socket.AF_UNIX).connect('\\0k8e-neighbour')):\n    try:\n        make(); print('reached')\n    except OSError: print('refused')";
    assert_eq!(b.py(reach).out(), "refused\nrefused\n");
    assert!(
        a.py(reach).out().starts_with("reached\n"),
        "its own server answers it"
    );
}

#[test]
fn run_as_the_same_user_outside() {
    let server = Server::start();
    let (a, b) = (server.session(), server.session());
    let uid_of = |session: &k8e_e2e::Session<'_>, mark: &str| {
        // Until it is what it says: a shell's child is a shell first.
        session.sh(&format!(
            "sleep {mark} & until grep -q sleep /proc/$!/comm; do :; done"
        ));
        let out = std::process::Command::new("ps")
            .args(["-eo", "uid,args"])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let line = text
            .lines()
            .find(|line| line.contains(&format!("sleep {mark}")))
            .unwrap()
            .to_owned();
        line.split_whitespace()
            .next()
            .unwrap()
            .parse::<u32>()
            .unwrap()
            / 65536
    };
    assert_ne!(
        uid_of(&a, "62.101"),
        uid_of(&b, "62.202"),
        "each sandbox has its own range"
    );
}

#[test]
fn use_up_what_the_kernel_counts_per_user() {
    // Watches, terminals and asynchronous IO are counted: for the sandbox's own number, not for everybody.
    let server = Server::start();
    let (attacker, neighbour) = (server.session(), server.session());
    let hog = r"
import ctypes, os, pty
libc = ctypes.CDLL(None, use_errno=True)
watches = 0
while watches < 4096 and libc.inotify_init1(0) >= 0: watches += 1
terminals = 0
try:
    while terminals < 5000: os.open('/dev/ptmx', os.O_RDWR); terminals += 1
except OSError: pass
print(watches > 0, 0 < terminals <= 256, libc.syscall(206, 65536, ctypes.byref(ctypes.c_ulong())))
if os.fork(): os._exit(0)
import time; time.sleep(60)
";
    let ran = attacker.py(&format!(
        "import os\nif os.fork() == 0:\n    os.setsid()\n    exec({hog:?})\nos.wait()"
    ));
    assert!(ran.out().starts_with("True True -1"), "{}", ran.all());
    let host = rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::CLOEXEC);
    assert!(host.is_ok(), "the host's root has none left");
    let other = neighbour.py("import ctypes, os\nprint(ctypes.CDLL(None).inotify_init1(0) >= 0, os.open('/dev/ptmx', os.O_RDWR) > 0)");
    assert_eq!(other.out(), "True True\n", "{}", other.all());
}
