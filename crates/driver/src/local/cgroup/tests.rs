//! Both versions, on files in the format of cgroupfs.

use super::*;

pub(super) fn group(version: Version, dir: &Path, controllers: &[&'static str]) -> Cgroup {
    let dirs = controllers.iter().map(|name| (*name, dir.to_owned()));
    Cgroup {
        version,
        dirs: dirs.collect(),
        huge_pages: None,
    }
}

#[test]
fn v1_is_found_on_a_hybrid_machine() {
    let mounts = "cgroup /c/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup /c/memory cgroup rw,memory 0 0\n\
                  cgroup /c/pids cgroup rw,pids 0 0\ncgroup /c/freezer cgroup rw,freezer 0 0\ncgroup2 /c/unified-nowhere cgroup2 rw 0 0\n";
    let (version, roots) = find(mounts).unwrap();
    assert_eq!(version, Version::V1);
    let at = |name: &'static str| (name, Path::new("/c").join(name));
    let counted = (CPUACCT, Path::new("/c/cpu").to_owned());
    let all =
        |names: [&'static str; 4]| [&names.map(at)[..], std::slice::from_ref(&counted)].concat();
    assert_eq!(roots, all([MEMORY, CPU, PIDS, FREEZER]));
    // The freezer is optional.
    let without = mounts.replace("freezer", "devices");
    assert_eq!(find(&without).unwrap().1, all([MEMORY, CPU, PIDS, DEVICES]));
}

#[test]
fn v2_is_found_when_it_has_the_controllers() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("cgroup.controllers"),
        "cpuset cpu io memory pids\n",
    )
    .unwrap();
    let mounts = format!("cgroup2 {} cgroup2 rw 0 0\n", dir.path().display());
    let all = [MEMORY, CPU, PIDS, IO].map(|name| (name, dir.path().to_owned()));
    assert_eq!(find(&mounts), Some((Version::V2, all.to_vec())));
}

#[test]
fn without_controllers_there_is_nothing() {
    assert_eq!(
        find("cgroup2 /nowhere cgroup2 rw 0 0\nproc /proc proc rw 0 0\n"),
        None
    );
}

#[test]
fn counters_are_read() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n").unwrap();
    assert_eq!(counter(Some(file.as_file()), "oom_kill"), 7);
    assert_eq!(counter(None, "max"), 0);
}

#[test]
fn cpu_time_is_read_in_both_formats() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for (text, expected) in [
        ("1500000\n", Some(Duration::from_micros(1500))),
        (
            "usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n",
            Some(Duration::from_micros(1500)),
        ),
        ("nothing\n", None),
    ] {
        fs::write(file.path(), text).unwrap();
        assert_eq!(cpu_time(file.as_file()), expected, "{text}");
    }
}

#[test]
fn only_processes_listed_while_their_pidfd_is_open_are_killed() {
    use std::os::unix::process::ExitStatusExt as _;
    let mut child = std::process::Command::new("sleep")
        .arg("1000")
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&child);
    // Not in the group at the second look: the process id was reused.
    let mut looks = [vec![pid], vec![]].into_iter();
    kill_members(|| looks.next().unwrap());
    assert!(child.try_wait().unwrap().is_none());
    let dir = tempfile::tempdir().unwrap();
    let procs = format!("{}\n0\n-1\nx\n", pid.as_raw_nonzero());
    fs::write(dir.path().join("cgroup.procs"), procs).unwrap();
    assert_eq!(members(dir.path()), [pid]);
    kill_members(|| members(dir.path()));
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    assert_eq!(members(&dir.path().join("gone")), []);
}

#[test]
fn limits_are_written_for_either_version() {
    let dir = tempfile::tempdir().unwrap();
    let read = |file: &str| fs::read_to_string(dir.path().join(file)).unwrap();
    let limits = Limits {
        memory_bytes: 64 << 20,
        cpu_millis: 1500,
        pids: 99,
        disk_bytes: 0,
    };
    fs::write(dir.path().join("memory.swap.max"), "max").unwrap();
    let v2 = group(Version::V2, dir.path(), &CONTROLLERS);
    v2.create(&limits).unwrap();
    assert_eq!(
        (read("memory.max"), read("memory.swap.max")),
        ("67108864".to_owned(), "0".to_owned())
    );
    assert_eq!(
        (read("cpu.max"), read("pids.max")),
        ("150000 100000".to_owned(), "99".to_owned())
    );
    assert_eq!(v2.join(), Join::CloneInto(dir.path().to_owned()));
    fs::write(
        dir.path().join("memory.events"),
        "oom 3\noom_kill 2\noom_group_kill 0\n",
    )
    .unwrap();
    fs::write(dir.path().join("pids.events"), "max 5\n").unwrap();
    assert_eq!(
        v2.counters().read(),
        LimitEvents {
            oom_kills: 2,
            pids_refused: 5
        }
    );

    let v1 = group(Version::V1, dir.path(), &CONTROLLERS);
    fs::write(dir.path().join("memory.kmem.tcp.limit_in_bytes"), "max").unwrap();
    v1.create(&limits).unwrap();
    assert_eq!(read("memory.limit_in_bytes"), "67108864");
    assert_eq!(read("memory.kmem.tcp.limit_in_bytes"), "16777216");
    assert_eq!(
        (read("cpu.cfs_quota_us"), read("cpu.cfs_period_us")),
        ("150000".to_owned(), "100000".to_owned())
    );
}
