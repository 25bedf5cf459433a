//! On what was measured: enough to judge the figures, nothing that names the machine.

use super::host::system;
use super::subject::Host;
use serde::Serialize;
use std::collections::BTreeMap;
use std::process::Stdio;

/// What of a tool's version is told.
const VERSION_CHARS_MAX: usize = 60;

/// The machine.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    pub(super) system: &'static str,
    pub(super) kernel: String,
    pub(super) cpu: String,
    pub(super) cpus: usize,
    pub(super) memory_gib: f64,
    pub(super) cgroups: &'static str,
    /// Of the programs that were measured.
    pub(super) tools: BTreeMap<&'static str, String>,
    /// Of this program, which measures.
    pub(super) k8e: &'static str,
    /// Of the server.
    pub(super) server: String,
}

// === impl Machine ===

impl Machine {
    pub(super) fn describe(server: &str) -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let exists = |path: &str| std::path::Path::new(path).exists();
        Self {
            system: std::env::consts::OS,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            cpu: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown".into()),
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory_gib: memory_gib(&read("/proc/meminfo")),
            cgroups: match exists("/sys/fs/cgroup/cgroup.controllers") {
                true => "v2",
                false => "v1",
            },
            tools: BTreeMap::new(),
            k8e: env!("CARGO_PKG_VERSION"),
            server: server.to_owned(),
        }
    }

    /// What was measured beside us.
    pub(super) fn add_tools(&mut self, measured: &[Host]) {
        let tools = measured.iter().filter(|host| **host != Host::ForkExec);
        self.tools
            .extend(tools.map(|host| (host.program(), version(host.program()))));
    }

    /// Two lines.
    pub(super) fn text(&self) -> String {
        let Self {
            system,
            kernel,
            cpu,
            cpus,
            memory_gib,
            cgroups,
            ..
        } = self;
        let tools: Vec<&str> = self.tools.values().map(String::as_str).collect();
        format!(
            "{system} {kernel}, {cpus} × {cpu}, {memory_gib:.1} GiB, cgroup {cgroups}\nk8e {}, server {}; {}\n",
            self.k8e,
            self.server,
            tools.join("; ")
        )
    }
}

/// `model name : Some CPU`, the first.
fn field(text: &str, key: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.strip_prefix(key));
    Some(value?.trim_start().strip_prefix(':')?.trim().to_owned())
}

fn memory_gib(meminfo: &str) -> f64 {
    let total = field(meminfo, "MemTotal").unwrap_or_default();
    let kib: f64 = total.trim_end_matches("kB").trim().parse().unwrap_or(0.0);
    kib / 1024.0 / 1024.0
}

/// The first line of what it says of itself.
fn version(program: &'static str) -> String {
    let said = system(program)
        .arg("--version")
        .stdout(Stdio::piped())
        .output();
    let said = said.map(|said| said.stdout).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let first = said.lines().next().unwrap_or(program);
    first.chars().take(VERSION_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_described_without_its_name() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Other\n";
        assert_eq!(field(cpuinfo, "model name").unwrap(), "Some CPU @ 2 GHz");
        assert_eq!(memory_gib("MemTotal:        2097152 kB\n"), 2.0);
        assert_eq!(memory_gib(""), 0.0);
        let mut machine = Machine::describe("1.2.3");
        machine.add_tools(&[Host::ForkExec]);
        assert!(machine.tools.is_empty());
        let text = machine.text();
        assert!(text.contains("server 1.2.3"), "{text}");
        let json = serde_json::to_value(&machine).unwrap();
        let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
        let expected = [
            "cgroups",
            "cpu",
            "cpus",
            "k8e",
            "kernel",
            "memory_gib",
            "server",
            "system",
            "tools",
        ];
        assert_eq!(keys, expected);
    }
}
