//! Input of a running command from the host: standard input, signals, or end of connection (cancel).

use crate::sys;
use bytes::{Buf as _, Bytes};
use k8e_wire::Requests;
use k8e_wire::proto::input::Input;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;
use tokio::net::unix::pipe::Sender;

/// Bytes buffered for a command that does not read its input. Beyond, the host is not read (backpressure).
const PENDING_BYTES_MAX: usize = 1024 * 1024;

/// Poll interval for a closed connection while the host is not read.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Highest signal number.
const SIGNAL_MAX: i32 = 64;

/// Forwards input and signals to the command with process id `pid` (0: not started yet). Returns
/// when the host closed, which cancels.
pub(crate) async fn forward(requests: &mut Requests, mut stdin: Option<Sender>, pid: &AtomicI32) {
    let mut pending: VecDeque<Bytes> = VecDeque::new();
    let mut ended = false;
    loop {
        let room = pending.iter().map(Bytes::len).sum::<usize>() < PENDING_BYTES_MAX;
        tokio::select! {
            input = requests.input(), if room => match input {
                Ok(Some(Input::Data(data))) => {
                    if stdin.is_some() && !ended && !data.is_empty() {
                        pending.push_back(data);
                    }
                }
                Ok(Some(Input::End(_))) => ended = true,
                Ok(Some(Input::Signal(signal))) => send_signal(pid.load(Ordering::Relaxed), signal),
                Ok(Some(Input::TreeWants(_) | Input::TreeEntries(_) | Input::TreePieces(_))) => {}
                Ok(None) | Err(_) => return,
            },
            written = write_some(stdin.as_ref(), pending.front()) => match written {
                Ok(written) => advance(&mut pending, written),
                // The command closed its input or exited: the rest is dropped.
                Err(_) => {
                    stdin = None;
                    pending.clear();
                }
            },
            () = tokio::time::sleep(LOOK_EVERY), if !room => {
                if has_closed(requests) {
                    return;
                }
            }
        }
        if ended && pending.is_empty() {
            stdin = None;
        }
    }
}

async fn write_some(stdin: Option<&Sender>, data: Option<&Bytes>) -> std::io::Result<usize> {
    let (Some(stdin), Some(data)) = (stdin, data) else {
        return std::future::pending().await;
    };
    stdin.writable().await?;
    match stdin.try_write(data) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(0),
        written => written,
    }
}

fn advance(pending: &mut VecDeque<Bytes>, written: usize) {
    if let Some(front) = pending.front_mut() {
        front.advance(written);
        if front.is_empty() {
            pending.pop_front();
        }
    }
}

fn send_signal(pid: i32, signal: i32) {
    if pid > 1 && (1..=SIGNAL_MAX).contains(&signal) {
        sys::kill(-pid, signal);
    }
}

/// Whether the host closed its end, although unread input may precede that.
pub(crate) fn has_closed(requests: &Requests) -> bool {
    let mut poll = [PollFd::new(requests, PollFlags::RDHUP)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|ready| ready > 0)
}
