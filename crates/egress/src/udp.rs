//! Datagrams that are not DNS: nobody gets them, and it is written down whom they were for.

use crate::sys;
use crate::ward::Ward;
use k8e_model::egress::{DenyReason, Flow, FlowProtocol, FlowVerdict};
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// Read at once before others get their turn.
const BATCH: usize = 64;

/// A program that sends without end costs no more than this: the kernel drops the rest.
const PAUSE: Duration = Duration::from_millis(50);

/// Until it is dropped.
pub(crate) async fn serve(ward: Arc<Ward>, socket: UdpSocket) {
    loop {
        if socket.readable().await.is_err() {
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        for _ in 0..BATCH {
            let received = socket.try_io(Interest::READABLE, || sys::original_destination(&socket));
            match received {
                Ok(Some(to)) => ward.note(denied(to)),
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
