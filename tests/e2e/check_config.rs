//! `k8e check-config`: it finds out what works by trying, and names what does not.

use k8e_e2e::{binary, install};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output};

const NOBODY: u32 = 65534;

#[test]
fn a_machine_that_works_is_told_so_and_left_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let output = check(&data, &["--json"]).output().unwrap();
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    assert_eq!(report["usable"], true);
    let checks = report["checks"].as_array().unwrap();
    for check in checks {
        let field = |name: &str| check[name].as_str().unwrap_or_else(|| panic!("{check}"));
        let verdict = field("verdict");
        assert!(["ok", "unknown", "weaker", "missing"].contains(&verdict));
        assert!(["kernel", "limits", "runtimes", "languages"].contains(&field("group")));
        assert!(!field("found").is_empty(), "{check}");
        // Whatever is not fine comes with what to do.
        assert_eq!(verdict == "ok", field("fix").is_empty(), "{check}");
    }
    for name in ["root", "namespaces", "control groups", "python"] {
        assert_eq!(named(&report, name)["verdict"], "ok", "{report:#}");
    }
    // Weaker on control groups of version 1, which do not hold what the kernel writes back later.
    for name in ["native", "gvisor"] {
        let (found, verdict) = (
            &named(&report, name)["found"],
            &named(&report, name)["verdict"],
        );
        assert!(
            found.as_str().unwrap().contains("made a sandbox"),
            "{report:#}"
        );
        assert!(verdict == "ok" || verdict == "weaker", "{report:#}");
    }
    for name in ["kata", "firecracker"] {
        assert_eq!(named(&report, name)["verdict"], "missing");
    }
    assert!(
        named(&report, "gvisor")["found"]
            .as_str()
            .unwrap()
            .contains("runsc")
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

    let table = check(&data, &[]).output().unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("sandboxes can be created here"), "{table}");
    assert!(table.contains("→ use gvisor or native"), "{table}");
}

#[test]
fn a_broken_runsc_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "#!/bin/sh\nexit 7\n").unwrap();
    install(&script, &bin.join("runsc"));
    // Nobody but this command sees it.
    let script = "mount --bind \"$0\" /usr/local/sbin && exec \"$@\"";
    let real = check(&dir.path().join("data"), &["--json"]);
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script])
        .arg(&bin)
        .arg(real.get_program())
        .args(real.get_args())
        .output()
        .unwrap();
    let report = json(&output);
    let gvisor = named(&report, "gvisor");
    assert_eq!(gvisor["verdict"], "missing", "{report:#}");
    let fix = gvisor["fix"].as_str().unwrap();
    assert!(fix.contains("/usr/local/sbin/runsc"), "{fix}");
    assert!(
        fix.contains("exit status: 7") && fix.contains("install"),
        "{fix}"
    );
    // The other one works, so sandboxes can be made.
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(report["usable"], true);
}

#[test]
fn what_cannot_work_is_told() {
    // Every sandbox would see it.
    let output = check(Path::new("/usr/k8e-data"), &["--json"])
        .output()
        .unwrap();
    let report = json(&output);
    assert_eq!(output.status.code(), Some(1), "{report:#}");
    assert_eq!(report["usable"], false);
    assert_eq!(named(&report, "data directory")["verdict"], "missing");
    let fix = named(&report, "native")["fix"].as_str().unwrap();
    assert!(fix.contains("--data-dir"), "{fix}");
    assert!(!Path::new("/usr/k8e-data").exists());
}

#[test]
fn without_root_it_says_what_it_could_not_try() {
    // Where anybody may execute it.
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let copy = dir.path().join("k8e");
    install(&binary(), &copy);
    let output = Command::new(&copy)
        .args(["check-config", "--json"])
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    let report = json(&output);
    assert_eq!(output.status.code(), Some(1), "{report:#}");
    assert_eq!(named(&report, "root")["verdict"], "missing");
    for name in ["native", "gvisor"] {
        let check = named(&report, name);
        assert_eq!(check["verdict"], "unknown", "{check}");
        assert!(check["fix"].as_str().unwrap().contains("sudo"), "{check}");
    }
    for name in ["mount API", "control groups", "overlay", "seccomp"] {
        assert_eq!(named(&report, name)["verdict"], "ok", "{report:#}");
    }
}

fn check(data_dir: &Path, flags: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(["check-config", "--data-dir"]).arg(data_dir);
    command.args(flags);
    command
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("not JSON ({error}): {output:?}"))
}

fn named<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["checks"].as_array().unwrap();
    let found = checks.iter().find(|check| check["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {report:#}"))
}
