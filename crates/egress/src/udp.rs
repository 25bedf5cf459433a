//! UDP other than DNS (QUIC, NTP, …): dropped, with the original destination in the flow log.

use crate::sandbox_net::SandboxNet;
use crate::sys;
use k8e_model::egress::{DenyReason, Flow, FlowProtocol, FlowVerdict};
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// Datagrams read before yielding to other tasks.
const BATCH: usize = 64;

/// Pause between two batches, which bounds the CPU time that a sandbox's datagrams cost: at most
/// `BATCH` per pause are read, the kernel drops the rest.
const PAUSE: Duration = Duration::from_millis(50);

/// Reads and logs datagrams until the task is dropped.
pub(crate) async fn serve(sandbox: Arc<SandboxNet>, socket: UdpSocket) {
    loop {
        if socket.readable().await.is_err() {
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        for _ in 0..BATCH {
            let received = socket.try_io(Interest::READABLE, || sys::original_destination(&socket));
            match received {
                Ok(Some(to)) => sandbox.note(denied(to)),
                Ok(None) => {}
                Err(_) => break,
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn denied(to: SocketAddrV4) -> Flow {
    Flow {
        at: crate::gate::now(),
        verdict: FlowVerdict::Denied,
        protocol: FlowProtocol::Udp,
        name: None,
        address: Some(*to.ip()),
        port: Some(to.port()),
        rule: None,
        reason: Some(DenyReason::Protocol),
        count: 1,
    }
}
