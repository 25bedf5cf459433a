//! Process list of a session's sandbox, as its guest reports it.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use crate::guest::{LISTING_TIMEOUT, PROCESSES_BYTES_MAX, PROCESSES_MAX, checked_process};
use crate::{Error, Sessions};
use bytes::Bytes;
use k8e_model::{Principal, SessionId};
use k8e_wire::proto::{ListProcesses, reply, request};

/// A process in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process id inside the sandbox.
    pub pid: i32,
    /// Process id of its parent.
    pub ppid: i32,
    /// One letter, as in `/proc/PID/stat`.
    pub state: char,
    /// Its name, 15 bytes at most.
    pub comm: Bytes,
    /// Arguments joined by NUL, cut at 4 KiB.
    pub cmdline: Bytes,
    /// Resident set size in bytes.
    pub rss_bytes: u64,
    /// User id inside the sandbox.
    pub uid: u32,
}

// === impl Sessions ===

impl Sessions {
    /// The processes of a session's sandbox.
    pub async fn processes(&self, who: &Principal, id: &SessionId) -> Result<Vec<Process>, Error> {
        let request = request::Call::ListProcesses(ListProcesses {});
        let mut call = self
            .call(who, id, request, "list processes".to_owned())
            .await?;
        let (mut processes, mut empties) = (Vec::new(), 0);
        let (mut time_left, mut bytes_left) = (LISTING_TIMEOUT, PROCESSES_BYTES_MAX);
        loop {
            match call.reply_within(&mut time_left).await? {
                reply::Reply::Processes(list) if list.processes.is_empty() => {
                    call.count_empty(&mut empties)?
                }
                reply::Reply::Processes(list) => {
                    if processes.len() + list.processes.len() > PROCESSES_MAX {
                        return Err(call.misbehaved("it listed more processes than there can be"));
                    }
                    let checked = |process| checked_process(process, &mut bytes_left);
                    processes.extend(list.processes.iter().map(checked));
                }
                reply::Reply::Done(_) => return Ok(processes),
                _ => return Err(call.misbehaved("it sent something else than processes")),
            }
        }
    }
}
