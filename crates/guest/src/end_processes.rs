//! `EndProcesses`: kills the processes of a session (sub-agent) that shares this sandbox with others.
//!
//! Its connections are closed, and so the commands under a supervisor are dead; what is left are background
//! processes. They are found by a variable in their environment (`/proc/PID/environ`), which is inherited by
//! children. A process that cleared it, or runs as a user whose processes root inside may
//! not inspect, is not found: it ends with the sandbox.

use crate::error::Error;
use crate::procfs::{self, Stat};
use crate::sys;
use k8e_wire::proto::{Done, EndProcesses, reply::Reply};
use std::collections::{BTreeSet, HashMap};
use std::io::Read as _;
use std::time::{Duration, Instant};

/// Deadline. A process that the kernel does not end within that is stuck.
const WITHIN: Duration = Duration::from_secs(5);

/// Interval between scans.
const PAUSE: Duration = Duration::from_millis(2);

/// Bytes read of a process's environment: those of the host's commands are far smaller.
const ENVIRON_BYTES_MAX: u64 = 1024 * 1024;

/// Kills them all, and those that are forked meanwhile.
pub(crate) async fn end(request: &EndProcesses) -> Result<Reply, Error> {
    let wanted: &[u8] = &request.env;
    if wanted.iter().position(|byte| *byte == b'=').unwrap_or(0) == 0 || wanted.contains(&0) {
        return Err(Error::Invalid(
            "the environment entry is not NAME=VALUE".to_owned(),
        ));
    }
    let begin = Instant::now();
    // Two empty scans: a process that was just being forked is found by the second.
    let mut empty_looks = 0;
    while empty_looks < 2 {
        let found = find(wanted)?;
        empty_looks = if found.is_empty() { empty_looks + 1 } else { 0 };
        for pid in found {
            sys::kill(pid, libc::SIGKILL);
        }
        if begin.elapsed() > WITHIN {
            return Err(Error::Precondition(
                "processes are still alive after SIGKILL: they are stuck in the kernel".to_owned(),
            ));
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(Reply::Done(Done::default()))
}

/// Live processes with the variable in their environment, and their descendants.
fn find(wanted: &[u8]) -> Result<BTreeSet<i32>, Error> {
    let all = procfs::scan().map_err(Error::os("read", b"/proc"))?;
    let me = i32::try_from(std::process::id()).unwrap_or(1);
    let mut children: HashMap<i32, Vec<&Stat>> = HashMap::new();
    for stat in &all {
        children.entry(stat.ppid).or_default().push(stat);
    }
    let mut queue: Vec<&Stat> = all.iter().filter(|stat| has(stat.pid, wanted)).collect();
    let mut found = BTreeSet::new();
    let mut seen = BTreeSet::new();
    while let Some(stat) = queue.pop() {
        if stat.pid == me || !seen.insert(stat.pid) {
            continue;
        }
        queue.extend(children.get(&stat.pid).into_iter().flatten());
        if stat.is_live() {
            found.insert(stat.pid);
        }
    }
    Ok(found)
}

fn has(pid: i32, wanted: &[u8]) -> bool {
    let mut environ = Vec::new();
    let Ok(file) = std::fs::File::open(format!("/proc/{pid}/environ")) else {
        return false;
    };
    // A process that exits meanwhile has an empty environment.
    let _ = file.take(ENVIRON_BYTES_MAX).read_to_end(&mut environ);
    environ
        .split(|byte| *byte == 0)
        .any(|entry| entry == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn processes_with_the_variable_end_and_no_others() {
        let start = |mark: &str| {
            let script = "sleep 77 & env -u K8E_TEST_MARK sleep 77 & wait";
            let mut command = std::process::Command::new("sh");
            command.args(["-c", script]).env("K8E_TEST_MARK", mark);
            command.spawn().unwrap()
        };
        let mark = format!("a{}", std::process::id());
        let (mut one, mut other) = (start(&mark), start("another"));
        let env = format!("K8E_TEST_MARK={mark}").into();
        // The shell, and both of its children.
        let all = format!("K8E_TEST_MARK={mark}");
        while find(all.as_bytes()).unwrap().len() < 3 {
            tokio::time::sleep(PAUSE).await;
        }
        // The test itself has to reap.
        let reaper = std::thread::spawn(move || one.wait().unwrap());
        end(&EndProcesses { env }).await.unwrap();
        assert!(!reaper.join().unwrap().success());
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
        end(&EndProcesses {
            env: "K8E_TEST_MARK=another".into(),
        })
        .await
        .unwrap();
        assert!(end(&EndProcesses { env: "=x".into() }).await.is_err());
        assert!(end(&EndProcesses::default()).await.is_err());
    }
}
