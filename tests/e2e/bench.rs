//! `k8e bench`: that it measures what it says and leaves nothing. How fast anything is, is not
//! asserted: that is what the benchmark is for.

use k8e_e2e::Server;
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const POOLS: [&str; 4] = ["--pool-min", "1", "--pool-max", "3"];

/// Far more than starting takes, on a machine that runs other tests as well.
const WAIT: Duration = Duration::from_secs(60);

#[test]
fn every_part_of_both_runtimes_is_measured() {
    let server = Server::start_with(&POOLS);
    let dir = tempfile::tempdir().unwrap();
    let svg = dir.path().join("chart.svg");
    let mut bench = server.command(&["bench", "--json", "--iterations", "2", "--clients", "2"]);
    bench.args(["--seconds", "1", "--live", "1,10,12", "--live-gvisor", "1"]);
    bench.arg("--svg").arg(&svg).env("TMPDIR", dir.path());
    let output = bench.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    // Nobody looks at a terminal.
    assert_eq!(said, "");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();

    let subjects = report["latency"]["subjects"].as_array().unwrap();
    let names = |group: &str| -> Vec<&str> {
        let of = subjects.iter().filter(|subject| subject["group"] == group);
        of.map(|subject| subject["name"].as_str().unwrap())
            .collect()
    };
    for name in [
        "fork+exec",
        "python3 print(1)",
        "bubblewrap",
        "runsc run",
        "runsc exec",
    ] {
        assert!(names("host").contains(&name), "{name}: {report}");
    }
    for runtime in ["native", "gvisor"] {
        let all = [
            "create, cold",
            "create, warm",
            "exec true",
            "create+exec+destroy",
            "k8e sandbox run, fresh",
            "k8e sandbox run, python",
        ];
        assert_eq!(names(runtime), all);
    }
    for subject in subjects {
        assert_eq!(subject["measured"], 2, "{subject}");
        assert!(subject["p50_ms"].as_f64().unwrap() > 0.0, "{subject}");
        assert!(
            subject["p50_ms"].as_f64() <= subject["p99_ms"].as_f64(),
            "{subject}"
        );
    }
    let claim = subjects
        .iter()
        .find(|subject| subject["name"] == "create, warm")
        .unwrap();
    let ratio = &claim["ratios"][0];
    assert_eq!(
        (&ratio["baseline"], &ratio["bar"]),
        (&"fork+exec".into(), &1.0.into())
    );
    assert!(
        ratio["ratio"].is_f64() && ratio["met"].is_boolean(),
        "{ratio}"
    );
    // Each claim waited until there was something to claim.
    for pool in report["latency"]["pools"].as_array().unwrap() {
        assert_eq!(
            (&pool["misses"], &pool["hit_rate"]),
            (&0.into(), &1.0.into()),
            "{pool}"
        );
    }

    for row in report["throughput"]["rows"].as_array().unwrap() {
        assert!(row["done"].as_u64().unwrap() > 0, "{row}");
    }
    let density = report["density"].as_array().unwrap();
    let counts: Vec<&Value> = density.iter().map(|row| &row["live"]).collect();
    assert_eq!(counts, [1, 10, 12, 1]);
    for row in density {
        assert!(
            row["memory"]["sandboxes"].as_u64() >= row["live"].as_u64(),
            "{row}"
        );
        assert!(row["memory"]["each_mb"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["server"]["rss_mb"].as_f64().unwrap() > 1.0, "{row}");
        assert!(row["claims"].as_u64().unwrap() >= 30, "{row}");
    }
    assert!(density[2]["claim"]["ratio"].is_f64(), "{}", density[2]);
    assert!(report["machine"]["cpus"].as_u64().unwrap() > 0);

    let chart = std::fs::read_to_string(&svg).unwrap();
    assert!(
        chart.contains("native create, warm") && chart.contains("</svg>"),
        "{chart}"
    );
    assert_eq!(server.session_ids(), Vec::<String>::new());
    std::fs::remove_file(&svg).unwrap();
    assert_empty(dir.path());
}

#[test]
fn interrupted_it_leaves_nothing() {
    let server = Server::start_with(&POOLS);
    let dir = tempfile::tempdir().unwrap();
    // As soon as it has made anything; and in the middle of the rounds, with a session of each runtime.
    let tries_programs = || std::fs::read_dir(dir.path()).unwrap().count() > 0;
    let measures = || server.session_ids().len() >= 2;
    let begun: [(&dyn Fn() -> bool, u64); 2] = [(&tries_programs, 0), (&measures, 500)];
    for (begun, pause_ms) in begun {
        let mut bench = server.command(&["bench", "--iterations", "100000"]);
        bench.stdout(Stdio::null()).env("TMPDIR", dir.path());
        let mut bench = bench.spawn().unwrap();
        let deadline = Instant::now() + WAIT;
        while !begun() {
            assert!(Instant::now() < deadline, "it does not begin");
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(pause_ms));
        let pid = rustix::process::Pid::from_child(&bench);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        assert_eq!(ended(&mut bench), Some(130));
        assert_eq!(server.session_ids(), Vec::<String>::new());
        assert_empty(dir.path());
    }
}

#[test]
fn who_has_no_room_is_told_which_flag_makes_some() {
    let server = Server::start_with(&["--max-sessions", "5"]);
    let args = [
        "bench",
        "--only",
        "density",
        "--runtime",
        "native",
        "--live",
        "1,50",
    ];
    let ran = server.k8e(&args);
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.out().contains("--max-sessions 150"), "{}", ran.all());
    assert!(ran.out().contains("native         1 "), "{}", ran.all());
    assert_eq!(server.session_ids(), Vec::<String>::new());
}

#[test]
fn nonsense_is_refused_before_anything_is_measured() {
    let server = Server::start();
    let ran = server.k8e(&["bench", "--runtime", "kata"]);
    assert_eq!(ran.code, 1, "{}", ran.all());
    assert!(ran.err().contains("no runtime kata"), "{}", ran.all());
    let ran = server.k8e(&["bench", "--only", "density", "--svg", "x"]);
    assert_eq!(ran.code, 1, "{}", ran.all());
    assert!(ran.err().contains("--svg"), "{}", ran.all());
}

fn ended(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + WAIT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Nothing in it, and no process that was started with it.
fn assert_empty(dir: &Path) {
    let left: Vec<_> = std::fs::read_dir(dir).unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    let name = dir.display().to_string();
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        assert!(!line.contains(&name), "{line}");
    }
}
