//! Attempts on the kernel: its settings, namespaces, modules, clocks, keys and newer subsystems.

use super::{attempt, attempt_sh, everywhere, everywhere_sh};

#[test]
fn write_a_sysctl() {
    attempt(
        r#"
for path in ["kernel/core_pattern", "kernel/hostname", "vm/overcommit_memory", "net/ipv4/ip_forward", "kernel/modprobe"]:
    print("tried", path)
    try:
        open("/proc/sys/" + path, "w").write("x")
        print("ESCAPED", path)
    except OSError: pass
"#,
    );
}

#[test]
fn trigger_sysrq() {
    everywhere_sh(
        "echo tried; echo h > /proc/sysrq-trigger && [ -s /proc/sysrq-trigger ] && echo ESCAPED; true",
    );
    // What is written goes to /dev/null: nothing must have reached the kernel.
}

#[test]
fn mount_a_file_system() {
    everywhere(
        "for kind in (b'tmpfs', b'proc', b'sysfs', b'cgroup', b'cgroup2', b'overlay'): refused(165, kind, b'/mnt', kind, 0, None)",
    );
}

#[test]
fn bind_mount_over_the_root() {
    everywhere("refused(165, b'/usr', b'/mnt', None, 4096, None)");
}

#[test]
fn remount_read_only_parts_writable() {
    everywhere(
        "refused(165, None, b'/proc/sys', None, 32 | 4096, None)\nrefused(166, b'/proc/sys', 2)\nrefused(166, b'/proc/kcore', 2)",
    );
}

#[test]
fn mount_with_the_new_calls() {
    attempt(
        "refused(430, b'tmpfs', 0)\nrefused(428, -100, b'/', 1)\nrefused(429, -100, b'/usr', -100, b'/mnt', 0)\nrefused(442, -100, b'/', 0, None, 0)",
    );
}

#[test]
fn pivot_the_root() {
    everywhere("refused(155, b'/', b'/mnt')");
}

#[test]
fn use_a_release_agent() {
    everywhere_sh(
        "echo tried
         mkdir -p /tmp/cg && mount -t cgroup -o memory cgroup /tmp/cg 2>/dev/null && echo ESCAPED
         mount -t cgroup2 none /tmp/cg 2>/dev/null && echo ESCAPED
         find / -xdev -name release_agent 2>/dev/null | grep -q . && echo ESCAPED; ls /sys/fs/cgroup 2>/dev/null | grep -q . && echo ESCAPED; true",
    );
}

#[test]
fn make_a_user_namespace() {
    attempt(
        r#"
for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000, 0x08000000, 0x04000000, 0x02000000):
    refused(272, flag)                       # unshare
    refused(56, flag | 17, 0, 0, 0, 0)       # clone
refused(435, (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, 17, 0, 0, 0), 64, by=(errno.ENOSYS,))  # clone3
"#,
    );
}

#[test]
fn make_a_user_namespace_with_the_tool() {
    attempt_sh(
        "echo tried; unshare --user --map-root-user --mount true 2>/dev/null && echo ESCAPED; true",
    );
}

#[test]
fn enter_the_namespaces_of_others() {
    attempt(
        r#"
for name in ("mnt", "net", "pid", "user", "uts", "ipc", "cgroup"):
    print("tried", name)
    try: fd = os.open("/proc/self/ns/" + name, os.O_RDONLY)
    except OSError: continue
    refused(308, fd, 0)
"#,
    );
}

#[test]
fn load_a_module() {
    everywhere(
        "buf = b'x' * 64\nrefused(175, buf, 64, b'')\nrefused(313, 0, b'', 0)\nrefused(176, b'nf_tables', 0)",
    );
}

#[test]
fn load_another_kernel() {
    everywhere("refused(246, 0, 0, None, 0)\nrefused(320, 0, 0, 0, None, 0)");
}

#[test]
fn reboot_the_machine() {
    everywhere("refused(169, 0xfee1dead, 672274793, 0, None)"); // Ctrl-Alt-Del off: harmless if it worked
}

#[test]
fn load_a_bpf_program() {
    everywhere(
        "refused(321, 5, (ctypes.c_char * 128)(), 128)\nrefused(321, 0, (ctypes.c_char * 128)(), 128)",
    );
}

#[test]
fn open_a_perf_event() {
    attempt("refused(298, (ctypes.c_char * 128)(), 0, -1, -1, 0)");
}

#[test]
fn use_userfaultfd() {
    attempt(
        "refused(323, 0)\nprint('device', os.path.exists('/dev/userfaultfd'))\nif os.path.exists('/dev/userfaultfd'): print('ESCAPED')",
    );
}

#[test]
fn use_io_uring() {
    attempt(
        "refused(425, 8, (ctypes.c_char * 256)())\nrefused(426, 0, 0, 0, 0, None)\nrefused(427, 0, 0, None, 0)",
    );
}

#[test]
fn read_and_plant_keys() {
    attempt(
        "refused(250, 0, -3, 0)\nrefused(248, b'user', b'x', b'y', 1, -3)\nrefused(249, b'user', b'x', None, -3)\nif open('/proc/keys').read(): print('ESCAPED')",
    );
}

#[test]
fn set_the_clock() {
    everywhere(
        r#"
now = (ctypes.c_long * 2)(0, 0)
refused(227, 0, now)           # clock_settime
refused(164, now, None)        # settimeofday
refused(159, (ctypes.c_char * 256)())  # adjtimex
refused(305, 0, (ctypes.c_char * 256)())  # clock_adjtime
"#,
    );
}

#[test]
fn rename_the_host() {
    everywhere("refused(170, b'pwned', 5)\nrefused(171, b'pwned', 5)");
}

#[test]
fn read_the_kernel_log() {
    attempt(
        "refused(103, 3, (ctypes.c_char * 4096)(), 4096)\nif os.path.exists('/dev/kmsg') or open('/proc/kmsg').read(10): print('ESCAPED')",
    );
}

#[test]
fn read_kernel_memory_and_symbols() {
    attempt(
        r#"
print("tried")
for path in ("/proc/kcore", "/dev/mem", "/dev/kmem", "/dev/port"):
    try:
        if os.path.exists(path) and open(path, "rb").read(16): print("ESCAPED", path)
    except OSError: pass
if open("/proc/kallsyms").read(100): print("ESCAPED kallsyms")
"#,
    );
}

#[test]
fn use_io_ports_and_descriptor_tables() {
    everywhere(
        "refused(172, 3)\nrefused(173, 0, 10, 1)\nrefused(154, 0, (ctypes.c_char * 16)(), 16)",
    );
}

#[test]
fn swap_account_and_quota() {
    everywhere(
        "refused(167, b'/workspace/x', 0)\nrefused(168, b'/x')\nrefused(163, b'/tmp/x')\nrefused(179, 0x800001, b'/dev/loop0', 0, None)",
    );
}

#[test]
fn call_the_kernel_the_old_way() {
    // 32-bit system calls go past a filter that only knows the 64-bit table.
    everywhere(
        r#"
import mmap, signal, subprocess
code = bytes.fromhex("b814000000" "cd80" "c3")  # mov eax, 20 (getpid); int 0x80; ret
print("tried")
pid = os.fork()
if pid == 0:
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    os._exit(0 if run() == os.getpid() else 1)
status = os.waitpid(pid, 0)[1]
if status == 0: print("ESCAPED")
"#,
    );
}

#[test]
fn flush_the_hosts_disks() {
    // A file of the host that is not written yet must not be written because a sandbox says `sync`.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("dirty");
    let pending = || {
        let out = std::process::Command::new("filefrag")
            .arg("-v")
            .arg(&file)
            .output();
        let out = out.expect("filefrag (e2fsprogs) runs");
        String::from_utf8_lossy(&out.stdout).contains("delalloc")
    };
    let server = k8e_e2e::Server::start();
    let session = server.session();
    // The host itself may write it at any time: it is enough that it stays once.
    let stayed = (0..5).any(|_| {
        let _ = std::fs::remove_file(&file);
        std::fs::write(&file, vec![7; 8 << 20]).unwrap();
        assert!(
            pending(),
            "this test needs a file system that delays writing (ext4, xfs): set TMPDIR"
        );
        let ran = session.py("import os; os.sync(); print('tried', os.system('sync'))");
        assert_eq!(ran.out(), "tried 0\n", "{}", ran.all());
        pending()
    });
    assert!(stayed, "sync in a sandbox wrote the host's files to disk");
}

#[test]
fn flush_its_own_files() {
    // Not an escape: a sandbox may write its own files to its own disk.
    let server = k8e_e2e::Server::start();
    let ran = server.session().py(
        "import os\nf = os.open('/workspace/f', os.O_RDWR | os.O_CREAT); os.write(f, b'x'); os.fsync(f); os.fdatasync(f)\n\
         import ctypes; print(ctypes.CDLL(None).syncfs(f))",
    );
    assert_eq!(ran.out(), "0\n", "{}", ran.all());
}

#[test]
fn take_huge_pages() {
    // They are a reserve of the machine's, and count as nobody's memory.
    attempt(
        r#"
for size in (0, 21 << 26, 30 << 26):
    refused(9, 0, 2 << 20, 3, 0x22 | 0x40000 | size, -1, 0)      # mmap
    refused(319, b"huge", 4 | size)                              # memfd_create
    refused(29, 0, 2 << 20, 0o1600 | 0o4000 | size)              # shmget
"#,
    );
}

#[test]
fn call_what_is_rarely_called() {
    attempt(
        r#"
refused(153)                                    # vhangup
refused(180, 0, None, None)                     # nfsservctl
refused(212, 0, None, 0)                        # lookup_dcookie
refused(300, 0, 0)                              # fanotify_init
refused(301, 0, 0, 0, 0, None)                  # fanotify_mark
refused(443, 0, 0, 0, None)                     # quotactl_fd
refused(447, 0)                                 # memfd_secret
refused(256, 1, 8, None, None)                  # migrate_pages of PID 1
refused(279, 1, 0, None, None, None, 0)         # move_pages of PID 1
"#,
    );
}

#[test]
fn call_what_the_filter_does_not_know() {
    // New calls, and the numbers of the x32 table, which a filter may take for something else.
    attempt(
        r#"
for number in list(range(463, 600)) + [1 << 20, 0x40000000 | 39, 0x40000000 | 165, 0x40000000 | 272]:
    refused(number, 0, 0, 0, 0, 0, by=(errno.ENOSYS,))
for number in (206, 209, 208): refused(number, 1, 0, 0, 0, 0, by=(errno.ENOSYS,))   # io_setup and what needs it
"#,
    );
}

#[test]
fn lift_the_filter() {
    attempt(
        r#"
import struct
allow = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7fff0000))
program = struct.pack("=H6xQ", 1, ctypes.addressof(allow))
print("tried", call(317, 1, 0, program), call(157, 22, 0, 0, 0, 0), call(157, 38, 0, 0, 0, 0))
refused(165, b"tmpfs", b"/mnt", b"tmpfs", 0, None)
refused(272, 0x10000000)
if "NoNewPrivs:\t1" not in open("/proc/self/status").read(): print("ESCAPED nnp")
if "Seccomp:\t2" not in open("/proc/self/status").read(): print("ESCAPED seccomp")
"#,
    );
}

#[test]
fn behave_like_another_kernel() {
    // Personalities that weaken memory protection, or that read numbers of other systems.
    attempt(
        "for persona in (0x0400000, 0x0100000, 0x0200000, 0x1000000, 0x8000000, 1, 6): refused(135, persona)",
    );
}

#[test]
fn change_the_file_systems_below() {
    // Freeze, trim, resize, shut down, make immutable, read by handle.
    attempt(
        r#"
for path in ("/workspace", "/", "/usr", "/dev/shm"):
    fd = os.open(path, os.O_RDONLY)
    buf = (ctypes.c_char * 256)()
    for request in (0xc0045877, 0xc0045878, 0xc0185879, 0x40086610, 0x8004587d, 0xc0106611, 0x6611):
        refused(16, fd, request, buf, by=(errno.EPERM, errno.ENOTTY, errno.EOPNOTSUPP, errno.EACCES, errno.EINVAL, errno.EBADF))
    flags = ctypes.c_long(0x10)
    refused(16, fd, 0x40086602, ctypes.byref(flags), by=(errno.EPERM, errno.ENOTTY, errno.EOPNOTSUPP, errno.EACCES))
"#,
    );
}

#[test]
fn wake_the_machine_and_keep_it_awake() {
    attempt(
        r#"
for clock in (8, 9): refused(222, clock, None, (ctypes.c_char * 8)(), by=(errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL))  # timer_create: alarms
for clock in (8, 9): refused(283, clock, 0, by=(errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL))                            # timerfd_create
for path in ("/sys/power/state", "/proc/acpi/wakeup", "/sys/power/wake_lock"):
    if os.path.exists(path): print("ESCAPED", path)
"#,
    );
}
