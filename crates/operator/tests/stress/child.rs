//! The operator in a child process: this test binary, started again with a single "test" that runs the operator.

use crate::faults::{self, Faults};
use crate::kinds::{config, options};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const KUBECONFIG: &str = "K8E_STRESS_KUBECONFIG";
const FAULTS: &str = "K8E_STRESS_FAULTS";
const PROBE_PORT: &str = "K8E_STRESS_PROBE_PORT";
const METRICS_PORT: &str = "K8E_STRESS_METRICS_PORT";

pub(crate) struct Operator {
    child: Child,
    probe: u16,
    metrics: u16,
}

/// Not a test: the operator, when this binary is started by [`Operator::start`].
#[test]
fn operator_process() {
    let Ok(kubeconfig) = std::env::var(KUBECONFIG) else {
        return; // in the test run itself this is a no-op
    };
    let port = |name: &str| std::env::var(name).expect("a port");
    let probe = format!("--health-probe-bind-address=127.0.0.1:{}", port(PROBE_PORT));
    let metrics = format!("--metrics-bind-address=127.0.0.1:{}", port(METRICS_PORT));
    let options = options(&["--leader-elect=false", &probe, &metrics]);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let config = config(Path::new(&kubeconfig)).await;
        let faults = match std::env::var(FAULTS).as_deref() {
            Ok("Storm") => Faults::Storm,
            Ok("Stubborn") => Faults::Stubborn,
            _ => Faults::None,
        };
        let client = faults::client(config, faults);
        let stop = async {
            let mut terminate =
                tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
                    .expect("signals");
            terminate.recv().await;
        };
        k8e_operator::run_with(client, options, stop)
            .await
            .expect("it runs until it is stopped");
    });
}

impl Operator {
    /// Starts the operator, with these faults between it and the API server.
    pub(crate) fn start(kubeconfig: &Path, faults: Faults) -> Self {
        let (probe, metrics) = (free_port(), free_port());
        let mut command = Command::new(std::env::current_exe().expect("our own path"));
        command
            .args(["child::operator_process", "--exact", "--nocapture"])
            .env(KUBECONFIG, kubeconfig)
            .env(FAULTS, format!("{faults:?}"))
            .env(PROBE_PORT, probe.to_string())
            .env(METRICS_PORT, metrics.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Self {
            child: command.spawn().expect("the operator starts"),
            probe,
            metrics,
        }
    }

    /// Waits for the initial cache sync (`/readyz`).
    pub(crate) fn wait_ready(&self) {
        let started = Instant::now();
        while get(self.probe, "/readyz").is_none_or(|answer| !answer.starts_with("HTTP/1.1 200")) {
            assert!(
                started.elapsed() < Duration::from_secs(120),
                "the operator is not ready"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sum of the work queue depths.
    pub(crate) fn backlog(&self) -> Option<f64> {
        let text = get(self.metrics, "/metrics")?;
        let depths = text
            .lines()
            .filter(|line| line.starts_with("k8e_operator_queue_depth"));
        Some(
            depths
                .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
                .sum(),
        )
    }

    /// Values of a metric, by labels.
    pub(crate) fn counted(&self, name: &str) -> Vec<(String, f64)> {
        let text = get(self.metrics, "/metrics").unwrap_or_default();
        let lines = text.lines().filter_map(|line| line.strip_prefix(name));
        lines
            .filter_map(|line| {
                let (labels, value) = line.rsplit_once(' ')?;
                Some((labels.to_owned(), value.parse().ok()?))
            })
            .collect()
    }

    /// Resident memory in bytes.
    pub(crate) fn memory(&self) -> u64 {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it lives");
        let line = status
            .lines()
            .find(|line| line.starts_with("VmRSS:"))
            .expect("a size");
        let kib: u64 = line
            .split_whitespace()
            .nth(1)
            .and_then(|n| n.parse().ok())
            .expect("a number");
        kib * 1024
    }
}

impl Drop for Operator {
    /// SIGKILL: the operator must not depend on a graceful shutdown.
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

fn get(port: u16, path: &str) -> Option<String> {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .ok()?;
    stream
        .write_all(
            format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes(),
        )
        .ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}
