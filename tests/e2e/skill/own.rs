//! The skill that `k8e skill` installs: everything that it shows works as it is typed.

use super::{Desk, INDEX};
use k8e_e2e::internet::Wheel;
use k8e_e2e::{Ran, binary};
use std::path::Path;
use std::process::{Command, Stdio};

/// A command that needs no server, with a home of its own.
fn k8e(home: &Path, args: &[&str]) -> Ran {
    let output = Command::new(binary())
        .args(args)
        .current_dir(home)
        .env("HOME", home)
        .env_remove("CLAUDE_CONFIG_DIR")
        .env_remove("CODEX_HOME")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: output.stdout,
        stderr: output.stderr,
    }
}

#[test]
fn every_command_line_that_the_skill_shows_works() {
    let desk = Desk::start_with("native", &["--expose-listen", "127.0.0.1:50052"]);
    let humanize = Wheel {
        package: "humanize",
        version: "2.99",
        source: "__version__ = '2.99'\n",
        scripts: "",
    };
    desk.internet.publish_to_index(INDEX, humanize);
    // Not in the document: the session that runs share learns where the test's index is.
    desk.prepare("");
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("script.py"), "print('from a file')\n").unwrap();
    std::fs::write(dir.path().join("data.csv"), "name,value\na,1\nb,2\n").unwrap();
    std::fs::create_dir(dir.path().join("project")).unwrap();
    std::fs::write(dir.path().join("project/main.py"), "print(1)\n").unwrap();

    let skill = k8e(dir.path(), &["skill", "print"]);
    assert_eq!(skill.code, 0, "{}", skill.all());
    let document = skill.out();
    let blocks: Vec<&str> = document
        .split("```sh\n")
        .skip(1)
        .map(|block| block.split("```").next().unwrap())
        .collect();
    assert!(blocks.len() >= 10, "{document}");
    let script = format!("set -euxo pipefail\n{}", blocks.concat());
    let output = desk
        .shell("bash", "", &script)
        .current_dir(dir.path())
        .output()
        .unwrap();
    let ran = Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: output.stdout,
        stderr: output.stderr,
    };
    assert_eq!(ran.code, 0, "{}", ran.all());
    let out = ran.out();
    for word in [
        "hello",
        "42",
        "from a file",
        "2.99",
        "made here",
        "built",
        "approved",
    ] {
        assert!(out.contains(word), "no {word} in {}", ran.all());
    }
    let lines = std::fs::read_to_string(dir.path().join("lines.txt")).unwrap();
    assert_eq!(lines.trim(), "3");
    // The keys that the text promises.
    let first: serde_json::Value = serde_json::from_str(out.lines().next().unwrap()).unwrap();
    for key in [
        "stdout",
        "stderr",
        "exit_code",
        "status",
        "session_id",
        "session_created",
    ] {
        assert!(document.contains(&format!("`{key}`")), "{key}");
        assert!(!first[key].is_null(), "{key} in {first}");
    }
}

#[test]
fn it_is_installed_for_each_agent_once() {
    let home = tempfile::tempdir().unwrap();
    let none = k8e(home.path(), &["skill", "install"]);
    assert_eq!(none.code, 1, "{}", none.all());
    let error = none.json()["error"].as_str().unwrap().to_owned();
    assert!(
        error.contains("claude, codex, gemini, kiro, openclaw, pi"),
        "{error}"
    );

    let places = [
        ("claude", ".claude/skills"),
        ("codex", ".codex/skills"),
        ("gemini", ".gemini/skills"),
        ("kiro", ".kiro/skills"),
        ("openclaw", ".openclaw/skills"),
        ("pi", ".pi/agent/skills"),
    ];
    let document = k8e(home.path(), &["skill", "print"]).out();
    assert!(
        document.starts_with("---\nname: k8e-sandbox\n"),
        "{document}"
    );
    for (agent, skills) in places {
        let ran = k8e(home.path(), &["sandbox-install-skill", agent]);
        let file = home.path().join(skills).join("k8e-sandbox/SKILL.md");
        let want = serde_json::json!({ "ok": true, "skills": [
            { "agent": agent, "path": file, "status": "installed" },
        ]});
        assert_eq!((ran.code, ran.json()), (0, want), "{}", ran.all());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), document);
    }
    let statuses = |ran: &Ran| -> Vec<String> {
        assert_eq!(ran.code, 0, "{}", ran.all());
        let skills = ran.json()["skills"].as_array().unwrap().clone();
        let status = |skill: &serde_json::Value| skill["status"].as_str().unwrap().to_owned();
        skills.iter().map(status).collect()
    };
    let again = k8e(home.path(), &["sandbox-install-skill", "all"]);
    assert_eq!(statuses(&again), ["unchanged"; 6]);

    // An old one of ours is brought up to date; one of somebody else's is kept.
    let claude = home.path().join(".claude/skills/k8e-sandbox/SKILL.md");
    std::fs::write(
        &claude,
        "---\nname: k8e-sandbox\nmetadata:\n  generator: k8e 0.0.1\n---\n",
    )
    .unwrap();
    assert_eq!(
        statuses(&k8e(home.path(), &["skill", "install", "claude"])),
        ["updated"]
    );
    std::fs::write(&claude, "mine").unwrap();
    for args in [
        &["skill", "install", "claude"][..],
        &["skill", "uninstall", "claude"],
    ] {
        let kept = k8e(home.path(), args);
        assert_eq!(kept.code, 1, "{}", kept.all());
        assert!(
            kept.err().contains("was not written by k8e"),
            "{}",
            kept.all()
        );
        assert_eq!(std::fs::read_to_string(&claude).unwrap(), "mine");
    }
    let forced = k8e(home.path(), &["skill", "install", "claude", "--force"]);
    assert_eq!(statuses(&forced), ["updated"]);

    // In a project only agents that are named get a directory, or that have one.
    let project = home.path().join("project");
    std::fs::create_dir_all(project.join(".pi")).unwrap();
    let flag = format!("--project={}", project.display());
    assert_eq!(
        statuses(&k8e(home.path(), &["skill", "install", &flag])),
        ["installed"]
    );
    assert!(project.join(".pi/skills/k8e-sandbox/SKILL.md").is_file());

    assert_eq!(
        statuses(&k8e(home.path(), &["skill", "uninstall"])),
        ["removed"; 6]
    );
    assert_eq!(
        statuses(&k8e(home.path(), &["skill", "uninstall"])),
        ["absent"; 6]
    );
    assert!(!claude.parent().unwrap().exists());
    assert!(project.join(".pi/skills/k8e-sandbox/SKILL.md").is_file());
}

#[test]
fn a_link_of_a_project_does_not_lead_out_of_it() {
    let home = tempfile::tempdir().unwrap();
    let elsewhere = home.path().join("elsewhere");
    std::fs::create_dir_all(home.path().join(".claude/skills")).unwrap();
    std::fs::create_dir(&elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, home.path().join(".claude/skills/k8e-sandbox")).unwrap();
    let ran = k8e(
        home.path(),
        &["skill", "install", "claude", "--project", "--force"],
    );
    assert_eq!(ran.code, 1, "{}", ran.all());
    assert!(ran.err().contains("symbolic link"), "{}", ran.all());
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
}
