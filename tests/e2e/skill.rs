//! The agent skill of K8E (`k8e-sandbox-skill`): its six scenarios, typed into a shell as the document has them.
//!
//! Where the document cannot be followed word for word, [`NOT_AS_WRITTEN`] says so, with what happens instead. Steps
//! that it leaves out (making `$SID`, installing pandas in that session) are marked as such in the scenario.

mod own;

use k8e_e2e::internet::{CDN, Internet, Wheel};
use k8e_e2e::{Ran, Server, binary};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};

const RUNTIMES: [&str; 2] = ["native", "gvisor"];

/// Stands for the package index of the document.
const INDEX: &str = "index.example";

/// Version of the package that [`INDEX`] calls pandas.
const PANDAS_VERSION: &str = "2.9.7";

/// As much of pandas as the document uses.
const PANDAS: &str = r#"
import csv
__version__ = "2.9.7"
class DataFrame:
    def __init__(self, rows): self.rows = rows
    def describe(self): return f"{len(self.rows)} rows of {', '.join(self.rows[0])}"
def read_csv(path):
    with open(path) as file: return DataFrame(list(csv.DictReader(file)))
"#;

/// What the document describes and k8e does not have, or has in another way.
struct NotAsWritten {
    /// What the document says.
    document: &'static str,
    /// The command as the document has it.
    typed: &'static str,
    exit: i32,
    /// What the error must contain.
    error: &'static str,
    /// What the error must say about what to do; in the error or its detail.
    advice: &'static str,
}

const NOT_AS_WRITTEN: [NotAsWritten; 6] = [
    NotAsWritten {
        document: "`create --manifest`: a workspace from a manifest (issue 17)",
        typed: "k8e sandbox create --manifest workspace.yaml",
        exit: 1,
        error: "unexpected argument '--manifest' found",
        advice: "see `k8e sandbox create --help`",
    },
    NotAsWritten {
        document: "`create --git-repo`: a workspace from a repository (issue 17)",
        typed: "k8e sandbox create --git-repo https://git.example/repo.git",
        exit: 1,
        error: "unexpected argument '--git-repo' found",
        advice: "see `k8e sandbox create --help`",
    },
    NotAsWritten {
        document: "runtime kata",
        typed: "k8e sandbox create --runtime kata",
        exit: 1,
        error: "runtime kata is not available",
        advice: "choose one of: native",
    },
    NotAsWritten {
        document: "runtime firecracker",
        typed: "k8e sandbox create --runtime firecracker",
        exit: 1,
        error: "runtime firecracker is not available",
        advice: "choose one of: native",
    },
    NotAsWritten {
        document: "scenario 3, step 4 reads a file that no step before it writes",
        typed: "k8e sandbox read $SID /workspace/result.json --raw",
        exit: 1,
        error: "/workspace/result.json",
        advice: "No such file or directory",
    },
    NotAsWritten {
        document: "an error is {\"ok\":false,\"error\":…}; here every error is {\"error\":…,\"detail\":…}",
        typed: "k8e sandbox destroy no-such-session",
        exit: 1,
        error: "no-such-session",
        advice: "not_found",
    },
];

/// A server on a miniature internet, and a shell that finds `k8e`.
struct Desk {
    // Ends first.
    server: Server,
    internet: Internet,
    /// Has `k8e` in it, and is `$HOME`.
    dir: tempfile::TempDir,
}

/// Runs a scenario on each runtime.
fn on_each_runtime(scenario: impl Fn(&Desk)) {
    for runtime in RUNTIMES {
        scenario(&Desk::start(runtime));
    }
}

// === impl Desk ===

impl Desk {
    fn start(runtime: &str) -> Self {
        Self::start_with(runtime, &[])
    }

    fn start_with(runtime: &str, more: &[&str]) -> Self {
        let internet = Internet::start();
        internet.zone().address(INDEX, &[CDN]);
        internet.zone().address("api.example.com", &[CDN]);
        let pandas = Wheel {
            package: "pandas",
            version: PANDAS_VERSION,
            source: PANDAS,
            scripts: "",
        };
        internet.publish_to_index(INDEX, pandas);
        let flags = ["--default-runtime", runtime, "--allowed-hosts", INDEX];
        let server = Server::start_on(&internet, &[&flags, more].concat());
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(binary(), dir.path().join("k8e")).unwrap();
        Self {
            server,
            internet,
            dir,
        }
    }

    /// A shell script on the host, with `$SID` set.
    fn shell(&self, shell: &str, sid: &str, script: &str) -> Command {
        let mut command = Command::new(shell);
        for (name, value) in self.server.command(&[]).get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let path = std::env::var("PATH").unwrap();
        command
            .args(["-c", script])
            .env("PATH", format!("{}:{path}", self.dir.path().display()))
            .env("HOME", self.dir.path())
            .env("SID", sid)
            .stdin(Stdio::null());
        command
    }

    /// Types something into `sh`, to its end.
    fn types(&self, sid: &str, script: &str) -> Ran {
        let output = self.shell("sh", sid, script).output().unwrap();
        Ran {
            code: output.status.code().unwrap_or(-1),
            stdout: output.stdout,
            stderr: output.stderr,
        }
    }

    /// Types something that must succeed.
    fn works(&self, sid: &str, script: &str) -> Ran {
        let ran = self.types(sid, script);
        assert_eq!(ran.code, 0, "{script}\n{}", ran.all());
        ran
    }

    /// Not in the document: the session learns where the test's index is and whose certificates it trusts.
    fn prepare(&self, sid: &str) -> Value {
        let prepare = format!(
            "mkdir -p ~/.config/pip\n\
             cat > ~/ca.pem <<'EOF'\n{}EOF\n\
             echo \"cacert = $HOME/ca.pem\" > ~/.curlrc\n\
             printf '[global]\\nindex-url = https://{INDEX}/simple\\ncert = %s\\n' ~/ca.pem > ~/.config/pip/pip.conf",
            self.internet.authority(),
        );
        let named = ["--session-id", sid];
        let named = if sid.is_empty() { &[][..] } else { &named[..] };
        let ran = self
            .server
            .k8e(&[&["sandbox", "run", &prepare], named].concat());
        assert_eq!(ran.code, 0, "{}", ran.all());
        ran.json()
    }

    /// Not in the document: makes `$SID`.
    fn session(&self) -> String {
        let made = self.works("", "k8e sandbox create | jq -r .session_id");
        made.out().trim().to_owned()
    }
}

#[test]
fn scenario_1_quick_code_execution() {
    on_each_runtime(|desk| {
        let typed = r#"k8e sandbox run "print('hello')" --lang python"#;
        let first = desk.works("", typed).json();
        assert_eq!(first["stdout"], "hello\n", "{first}");
        assert_eq!(first["stderr"], "", "{first}");
        assert_eq!(first["exit_code"], 0, "{first}");
        assert_eq!(first["session_created"], true, "{first}");
        let second = desk.works("", typed).json();
        assert_eq!(second["session_id"], first["session_id"], "{second}");
        let status = desk.works("", "k8e sandbox status").json();
        assert_eq!(status["session_id"], first["session_id"], "{status}");
        // The document's state file: there is none, the server knows.
        assert!(!desk.dir.path().join(".k8e").exists());
    });
}

#[test]
fn scenario_2_install_a_package_then_use_it() {
    on_each_runtime(|desk| {
        let prepared = desk.prepare("");
        let installed = desk.works("", r#"k8e sandbox run "pip install pandas" --lang bash"#);
        assert_eq!(
            installed.json()["session_id"],
            prepared["session_id"],
            "{}",
            installed.all()
        );
        let typed = r#"k8e sandbox run "python3 -c 'import pandas; print(pandas.__version__)'" --lang bash"#;
        let used = desk.works("", typed).json();
        assert_eq!(used["stdout"], format!("{PANDAS_VERSION}\n"), "{used}");
        assert_eq!(used["session_id"], prepared["session_id"], "{used}");
    });
}

#[test]
fn scenario_3_write_execute_read() {
    on_each_runtime(|desk| {
        let sid = desk.session();
        desk.prepare(&sid);
        // Not in the document: the session of step 1 has no pandas yet.
        desk.works(
            &sid,
            "k8e sandbox run 'pip install pandas' --session-id $SID",
        );
        desk.works(
            &sid,
            "k8e sandbox write $SID /workspace/analyze.py <<'PYEOF'\n\
             import pandas as pd\n\
             df = pd.read_csv('/workspace/data.csv')\n\
             print(df.describe())\n\
             PYEOF",
        );
        let typed = r#"echo "name,value\na,1\nb,2" | k8e sandbox write $SID /workspace/data.csv"#;
        // Right for sh, where echo knows \n. In bash it writes one line, with backslashes.
        let bash = desk.shell("bash", &sid, typed).output().unwrap();
        assert!(bash.status.success());
        let data = "k8e sandbox read $SID /workspace/data.csv --raw";
        assert_eq!(desk.works(&sid, data).out(), "name,value\\na,1\\nb,2\n");
        desk.works(&sid, typed);
        assert_eq!(desk.works(&sid, data).out(), "name,value\na,1\nb,2\n");
        let ran = desk.works(
            &sid,
            r#"k8e sandbox run "python3 /workspace/analyze.py" --session-id $SID"#,
        );
        assert_eq!(ran.json()["stdout"], "2 rows of name, value\n");
        let typed = "k8e sandbox read $SID /workspace/result.json --raw | jq .";
        // No step of the document writes it: nothing goes to jq, and the error is on stderr.
        let missing = desk.works(&sid, typed);
        assert_eq!(missing.out(), "");
        assert!(
            missing.err().contains("/workspace/result.json"),
            "{}",
            missing.all()
        );
        desk.works(
            &sid,
            r#"k8e sandbox run "echo '{\"rows\":2}' > /workspace/result.json" --session-id $SID"#,
        );
        assert_eq!(desk.works(&sid, typed).json()["rows"], 2);
    });
}

#[test]
fn scenario_4_custom_egress_in_an_explicit_session() {
    on_each_runtime(|desk| {
        // As written, which is gVisor on every server, and without naming a runtime.
        for (flag, runtime) in [("--runtime gvisor ", "gvisor"), ("", "")] {
            let create = format!(
                "SID=$(k8e sandbox create {flag}--allowed-hosts {INDEX},api.example.com | jq -r .session_id)\necho $SID"
            );
            let sid = desk.works("", &create).out().trim().to_owned();
            let made = desk.works(&sid, "k8e sandbox get $SID").json();
            if !runtime.is_empty() {
                assert_eq!(made["runtime"], runtime, "{made}");
            }
            desk.prepare(&sid);
            let typed =
                r#"k8e sandbox run "curl -s https://api.example.com/data" --session-id $SID"#;
            let fetched = desk.works(&sid, typed).json();
            let answer = fetched["stdout"].as_str().unwrap();
            assert!(answer.contains("/data"), "{fetched}");
            // Everything else is blocked.
            let typed = r#"k8e sandbox run "curl -s https://other.example/data" --session-id $SID"#;
            let denied = desk.types(&sid, typed);
            assert_ne!(denied.code, 0, "{}", denied.all());
            let names = &denied.json()["egress_denied"];
            assert_eq!(names[0], "other.example", "{}", denied.all());
            desk.works(&sid, "k8e sandbox destroy $SID");
            let gone = desk.types(&sid, typed);
            assert_eq!(gone.code, 1, "{}", gone.all());
        }
    });
}

#[test]
fn scenario_5_parallel_sub_agents() {
    /// Each waits for the other's file: they must run at the same time and share the workspace.
    fn task(mine: &str, other: &str) -> String {
        format!(
            "import os, time\n\
             open('/workspace/{mine}', 'w').close()\n\
             while not os.path.exists('/workspace/{other}'): time.sleep(0.01)\n\
             print('{mine} met {other}')\n"
        )
    }
    on_each_runtime(|desk| {
        let parent = desk.session();
        for (mine, other) in [("a", "b"), ("b", "a")] {
            let file = format!("task_{mine}.py");
            let write = ["sandbox", "write", &parent, &file];
            let written = desk.server.k8e_with(&write, task(mine, other).as_bytes());
            assert_eq!(written.code, 0, "{}", written.all());
        }
        let ran = desk.works(
            &parent,
            "PARENT=$SID\n\
             SUB1=$(k8e sandbox subagent $PARENT | jq -r .session_id)\n\
             SUB2=$(k8e sandbox subagent $PARENT | jq -r .session_id)\n\
             k8e sandbox run \"python3 task_a.py\" --session-id $SUB1 --raw &\n\
             k8e sandbox run \"python3 task_b.py\" --session-id $SUB2 --raw &\n\
             wait\n\
             echo $SUB1",
        );
        let out = ran.out();
        let mut lines: Vec<&str> = out.lines().collect();
        let sub = lines.pop().unwrap();
        lines.sort_unstable();
        assert_eq!(lines, ["a met b", "b met a"], "{}", ran.all());
        // "Max depth 1".
        let deeper = desk.types(sub, "k8e sandbox subagent $SID");
        assert_eq!(deeper.code, 1, "{}", deeper.all());
        assert!(deeper.out().contains("max depth 1"), "{}", deeper.all());
    });
}

#[test]
fn scenario_6_human_approval() {
    on_each_runtime(|desk| {
        let sid = desk.session();
        let typed = r#"k8e sandbox confirm $SID "delete /workspace/production-data""#;
        let mut asking = desk.shell("sh", &sid, typed);
        asking.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut asking = asking.spawn().unwrap();
        // What a person copies.
        let mut stderr = BufReader::new(asking.stderr.take().unwrap());
        let mut shown = String::new();
        let command = loop {
            let read = stderr.read_line(&mut shown).unwrap();
            assert_ne!(read, 0, "no command that approves in: {shown}");
            let line = shown.lines().last().unwrap_or_default();
            if let Some(at) = line.find("k8e sandbox approve ") {
                break line[at..].to_owned();
            }
        };
        assert!(asking.try_wait().unwrap().is_none(), "it does not wait");
        desk.works("", &command);
        let mut answer = String::new();
        let mut stdout = asking.stdout.take().unwrap();
        stdout.read_to_string(&mut answer).unwrap();
        assert!(asking.wait().unwrap().success(), "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["approved"], true, "{answer}");

        let typed = r#"k8e sandbox confirm $SID "delete /workspace/production-data" --no-wait"#;
        let registered = desk.works(&sid, typed).json();
        let id = registered["approval_id"].as_str().unwrap();
        let approved = desk.works("", &format!("AID={id}\nk8e sandbox approve $AID"));
        assert_eq!(approved.json()["ok"], true, "{}", approved.all());
    });
}

#[test]
fn what_is_not_as_written_is_a_clear_error() {
    let desk = Desk::start("native");
    let sid = desk.session();
    for case in NOT_AS_WRITTEN {
        let ran = desk.types(&sid, case.typed);
        assert_eq!(ran.code, case.exit, "{}: {}", case.document, ran.all());
        let raw = case.typed.contains("--raw");
        let said = match raw {
            // With --raw standard output is the file's.
            true => ran.err(),
            false => ran.json().to_string().replace("\\\"", "\""),
        };
        for part in [case.error, case.advice] {
            assert!(
                said.contains(part),
                "{}: {part} is not in {}",
                case.document,
                ran.all()
            );
        }
    }
    // Exit code 2 of the error table: no server.
    drop(desk.server);
    let nobody = Command::new(binary())
        .args(["sandbox", "status"])
        .env("K8E_SANDBOX_ENDPOINT", "unix:///no-such-directory/k8e.sock")
        .env("K8E_NO_AUTOSTART", "1")
        .output()
        .unwrap();
    assert_eq!(nobody.status.code(), Some(2));
    assert!(!Path::new("/no-such-directory").exists());
}
