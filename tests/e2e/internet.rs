//! A real miniature internet: two network namespaces, a cable between them, and servers.
//!
//! The server under test runs in one, its *host*. The other is the rest of the world: every
//! address of IPv4 and IPv6 is there, public, private and the cloud's own, and answers. So what a
//! sandbox must not reach is really there, and what says that nothing arrived is the receiving
//! side. There is no way from either to the network of the machine: no test can send a packet
//! outside.
#![expect(clippy::unwrap_used, reason = "all of it is for tests")]

mod addresses;
mod dns;
mod heard;
mod log;
mod namespace;
mod packages;
mod place;
mod sniffer;
mod sys;
mod tls;
mod web;
mod zone;

pub use addresses::*;
pub use log::{Connection, Datagram, Destination, Log, Query, Request};
pub use namespace::Namespace;
pub use packages::{PACKAGED, Wheel};
pub use zone::{Data, Zone};

use place::{Place, Plan};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;
use tls::Authority;

/// How long something that was sent may be under way, on a machine that is busy.
const UNDER_WAY: Duration = Duration::from_millis(250);

/// Where kernels take the ports of those who call from; below are those that are called.
const EPHEMERAL: u16 = 32_768;

/// The internet, and the host at its edge. Dropping it removes both.
#[derive(Debug)]
pub struct Internet {
    outside: Place,
    host: Place,
    zone: Zone,
    authority: Arc<Authority>,
    files: tempfile::TempDir,
}

// === impl Internet ===

impl Internet {
    /// Builds it.
    ///
    /// `good.example` and what is below it, `bad.example` and `other.example` are all at one
    /// address ([`CDN`]); `elsewhere.example` and `attacker.example` have one each, and
    /// `attacker.example` has every name below it as well.
    pub fn start() -> Self {
        let outside = Namespace::new();
        let host = Namespace::new();
        join(&host, &outside);
        let zone = Zone::default();
        for name in [
            "good.example",
            "*.good.example",
            "bad.example",
            "other.example",
        ] {
            zone.address(name, &[CDN]);
        }
        zone.address("elsewhere.example", &[ELSEWHERE]);
        zone.address("attacker.example", &[ATTACKER]);
        zone.address("*.attacker.example", &[ATTACKER]);
        let authority = Authority::new();
        let files = tempfile::tempdir().unwrap();
        let plan = |resolvers: &[Ipv4Addr], udp: &[Ipv4Addr]| Plan {
            authority: Arc::clone(&authority),
            zone: zone.clone(),
            files: files.path().to_owned(),
            resolvers: resolvers.to_vec(),
            udp: udp.to_vec(),
        };
        let everybody = [CDN, ATTACKER, ELSEWHERE, METADATA, PRIVATE, RESOLVER];
        Self {
            outside: Place::open(&outside, plan(&[DNS, RESOLVER], &everybody)),
            host: Place::open(&host, plan(&[], &[Ipv4Addr::LOCALHOST, HOST, HOST_PUBLIC])),
            zone,
            authority,
            files,
        }
    }

    /// The network that a server under test belongs in.
    pub fn host(&self) -> &Namespace {
        &self.host.namespace
    }

    /// Everything that arrived on the internet.
    pub fn log(&self) -> &Log {
        &self.outside.log
    }

    /// Everything that arrived at servers of the host.
    pub fn host_log(&self) -> &Log {
        &self.host.log
    }

    /// Which names there are.
    pub fn zone(&self) -> &Zone {
        &self.zone
    }

    /// What a client has to trust, as PEM.
    pub fn authority(&self) -> &str {
        self.authority.pem()
    }

    /// What a server under test is told to ask.
    pub fn dns_upstream(&self) -> String {
        format!("{DNS}:53")
    }

    /// Runs a command on the host, where nothing is forbidden.
    pub fn on_host(&self, program: &str, args: &[&str]) -> Output {
        self.host().output(Command::new(program).args(args))
    }

    /// Waits for what may still be under way.
    pub fn settle(&self) {
        std::thread::sleep(UNDER_WAY);
    }

    /// Forgets what arrived so far.
    pub fn forget(&self) {
        self.settle();
        self.outside.log.forget();
        self.host.log.forget();
    }

    /// Where packets arrived on the internet, but those to the server's own resolver.
    pub fn reached(&self) -> BTreeMap<Destination, u64> {
        let mut packets = self.outside.log.packets();
        let resolver = |to: &Destination| to.address == DNS && to.port == 53;
        packets.retain(|to, _| !to.is_housekeeping() && !resolver(to));
        packets
    }

    /// Where packets arrived on the host, but those that answer it.
    pub fn reached_host(&self) -> BTreeMap<Destination, u64> {
        let mut packets = self.host.log.packets();
        packets.retain(|to, _| !to.is_housekeeping() && to.port < EPHEMERAL);
        packets
    }
}

/// Lays the cable. It is plugged in at both ends before anybody has an address, and nobody has any
/// but these: else IPv6 waits a second before it believes in them.
fn join(host: &Namespace, outside: &Namespace) {
    host.ip(&format!(
        "link set lo up\n\
         link add net0 type veth peer name net0 netns {}\n\
         link set net0 addrgenmode none\n",
        outside.path(),
    ));
    let plug_in = "link set lo up\nlink set net0 addrgenmode none\nlink set net0 up\n";
    outside.ip(plug_in);
    host.ip(&format!(
        "link set net0 up\n\
         addr add {HOST}/30 dev net0\n\
         addr add {HOST_PUBLIC}/32 dev net0\n\
         addr add {}/64 dev net0 nodad\n\
         route add default via {UPLINK}\n\
         route add default via {}\n",
        addresses::HOST_V6,
        addresses::UPLINK_V6,
    ));
    // `local` in the table that is asked last: whatever is not on the cable is here.
    outside.ip(&format!(
        "addr add {UPLINK}/30 dev net0\n\
         addr add {}/64 dev net0 nodad\n\
         route add {HOST_PUBLIC}/32 via {HOST}\n\
         route add local 0.0.0.0/0 dev lo table main\n\
         route add local ::/0 dev lo table main\n",
        addresses::UPLINK_V6,
    ));
}
