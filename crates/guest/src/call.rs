//! One connection: reads the request, runs the call, and sends exactly one final reply.

use crate::error::Error;
use crate::{
    Guest, disk, end_processes, exec, files, forward, oom, processes, pty, runs, tree, watch,
};
use k8e_wire::proto::{Done, HelloReply, reply::Reply, request::Call};
use k8e_wire::{GuestEnd, PROTOCOL, ReplySink, Requests};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;

/// How long the rest of the input is drained after a failure, so that a host that is still sending gets
/// to read the error.
const LINGER: Duration = Duration::from_secs(5);

/// Answers the call of one connection.
pub(crate) async fn answer(guest: &Arc<Guest>, stream: UnixStream) {
    let mut end = GuestEnd::new(stream);
    // A spare connection: the request may come much later.
    let Ok(Some(call)) = end.requests.request().await else {
        return;
    };
    let sends = matches!(
        &call,
        Call::WriteFile(_) | Call::Forward(_) | Call::RestoreTree(_)
    ) || matches!(&call, Call::Exec(exec) if exec.stdin);
    match dispatch(guest, &mut end, call).await {
        Ok(last) => {
            let _ = end.replies.send(last).await;
        }
        Err(Error::Cancelled | Error::Wire(_)) => {}
        Err(error) => {
            let sent = end.replies.send(Reply::Error(error.to_proto())).await;
            if sent.is_ok() && sends {
                let _ = tokio::time::timeout(LINGER, closed(&mut end.requests)).await;
            }
        }
    }
}

/// Runs the call; returns its final reply.
async fn dispatch(guest: &Arc<Guest>, end: &mut GuestEnd, call: Call) -> Result<Reply, Error> {
    if changes_files(&call) {
        // While processes are stopped for a snapshot, none is started and no file is written.
        drop(guest.starts.read().await);
    }
    match call {
        Call::SaveTree(request) => Box::pin(tree::save(guest, end, request)).await,
        Call::RestoreTree(request) => Box::pin(tree::restore(guest, end, request)).await,
        Call::Exec(request) => {
            let held = guest.config.started_held;
            Box::pin(exec::exec(guest, end, request, held)).await
        }
        Call::WriteFile(request) => files::write(&mut end.requests, request).await,
        Call::Forward(request) => Box::pin(forward::forward(end, request)).await,
        Call::Hello(request) => Ok(Reply::Hello(HelloReply {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            processes: if request.count {
                processes::count(guest)?
            } else {
                0
            },
        })),
        Call::ReadFile(_)
        | Call::ListFiles(_)
        | Call::Stat(_)
        | Call::MakeDir(_)
        | Call::Move(_)
        | Call::Remove(_)
        | Call::ListProcesses(_)
        | Call::StartRun(_)
        | Call::AttachRun(_)
        | Call::EndRun(_)
        | Call::ForgetRun(_)
        | Call::CreateTerminal(_)
        | Call::AttachTerminal(_)
        | Call::WriteTerminal(_)
        | Call::ResizeTerminal(_)
        | Call::InspectTerminal(_)
        | Call::SignalTerminal(_)
        | Call::EndTerminal(_)
        | Call::ListTerminals(_)
        | Call::EndProcesses(_)
        | Call::CloseListener(_)
        | Call::WatchFiles(_)
        | Call::StatDisk(_)
        | Call::KillLargest(_) => {
            let GuestEnd { requests, replies } = end;
            tokio::select! {
                biased;
                last = without_input(guest, replies, call) => last,
                () = closed(requests) => Err(Error::Cancelled),
            }
        }
    }
}

async fn without_input(
    guest: &Arc<Guest>,
    replies: &mut ReplySink,
    call: Call,
) -> Result<Reply, Error> {
    let done = Ok(Reply::Done(Done::default()));
    match call {
        Call::ReadFile(request) => files::read(replies, request).await,
        Call::ListFiles(request) => files::list(replies, request).await,
        Call::Stat(request) => files::stat(&request).map(Reply::File),
        Call::MakeDir(request) => files::make_dir(&request).and(done),
        Call::Move(request) => files::rename(&request).and(done),
        Call::Remove(request) => files::remove(&request).await.and(done),
        Call::WatchFiles(request) => Box::pin(watch::watch(guest, replies, request)).await,
        Call::StatDisk(request) => disk::stat(&request).map(Reply::DiskUse),
        Call::ListProcesses(_) => processes::list(guest, replies).await,
        Call::StartRun(request) => Box::pin(runs::start(guest, replies, request)).await,
        Call::AttachRun(request) => runs::attach(guest, replies, request).await,
        Call::EndRun(request) => runs::end(guest, request).await,
        Call::ForgetRun(request) => runs::forget(guest, request).await,
        Call::CreateTerminal(request) => Box::pin(pty::create(guest, request)).await,
        Call::AttachTerminal(request) => pty::attach(guest, replies, request).await,
        Call::WriteTerminal(request) => pty::write(guest, request).await,
        Call::ResizeTerminal(request) => pty::resize(guest, request).await,
        Call::InspectTerminal(request) => pty::inspect(guest, request).await,
        Call::SignalTerminal(request) => pty::signal(guest, request).await,
        Call::EndTerminal(request) => pty::end(guest, request).await,
        Call::ListTerminals(_) => Ok(pty::list(guest)),
        Call::EndProcesses(request) => end_processes::end(&request).await,
        Call::CloseListener(_) => guest.listener.close().await.and(done),
        Call::KillLargest(request) => oom::kill_largest(guest, &request),
        Call::Hello(_)
        | Call::Exec(_)
        | Call::WriteFile(_)
        | Call::Forward(_)
        | Call::SaveTree(_)
        | Call::RestoreTree(_) => Err(Error::Invalid("not a unary call".to_owned())),
    }
}

/// Whether a call starts a process or writes a file.
fn changes_files(call: &Call) -> bool {
    matches!(
        call,
        Call::Exec(_)
            | Call::WriteFile(_)
            | Call::MakeDir(_)
            | Call::Move(_)
            | Call::Remove(_)
            | Call::StartRun(_)
            | Call::CreateTerminal(_)
    )
}

/// Resolves when the host has closed. Input that this call does not take is dropped.
async fn closed(requests: &mut Requests) {
    while let Ok(Some(_)) = requests.input().await {}
}
