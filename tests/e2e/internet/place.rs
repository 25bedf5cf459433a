//! One network with everything that listens in it, on a thread of its own.

use super::addresses::{DNS_TLS, ECHO, GREETER, PROXY, TLS, TLS_ELSEWHERE, WEB};
use super::dns::Resolver;
use super::heard::Heard;
use super::log::Log;
use super::namespace::Namespace;
use super::sniffer;
use super::tls::Authority;
use super::web::Web;
use super::zone::Zone;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;

const DNS_PORT: u16 = 53;
const DATA_BASE: u16 = 5432;
const TIME: u16 = 123;

/// Where datagrams are repeated, DNS's port only where no resolver is.
const UDP_PORTS: [u16; 4] = [TLS, TIME, ECHO, DNS_PORT];

const DATAGRAM_BYTES_MAX: usize = 65_535;

/// What is to be set up.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) authority: Arc<Authority>,
    pub(super) zone: Zone,
    pub(super) files: PathBuf,
    /// Who answers questions over UDP.
    pub(super) resolvers: Vec<Ipv4Addr>,
    /// Who repeats datagrams.
    pub(super) udp: Vec<Ipv4Addr>,
}

/// A network.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) namespace: Namespace,
    pub(super) log: Log,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What a port speaks.
#[derive(Clone, Copy, Debug)]
enum Speaks {
    Http,
    Https,
    Echo,
    GreetingFirst,
    Dns,
    DnsOverTls,
}

const TCP_PORTS: [(u16, Speaks); 9] = [
    (WEB, Speaks::Http),
    (PROXY, Speaks::Http),
    (TLS, Speaks::Https),
    (TLS_ELSEWHERE, Speaks::Https),
    (ECHO, Speaks::Echo),
    (DATA_BASE, Speaks::Echo),
    (GREETER, Speaks::GreetingFirst),
    (DNS_PORT, Speaks::Dns),
    (DNS_TLS, Speaks::DnsOverTls),
];

#[derive(Clone)]
struct Services {
    log: Log,
    web: Web,
    resolver: Resolver,
    tls: TlsAcceptor,
}

// === impl Place ===

impl Place {
    /// Sets it all up; everything listens when this returns.
    pub(super) fn open(namespace: &Namespace, plan: Plan) -> Self {
        let log = Log::default();
        let (stop, stopped) = oneshot::channel();
        let (ready, wait) = std::sync::mpsc::sync_channel(1);
        let inside = namespace.clone();
        let heard = log.clone();
        let thread = std::thread::spawn(move || {
            inside.enter();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                listen(&heard, &plan).await;
                ready.send(()).expect("somebody waits");
                // Stopped, or nobody is left to do it.
                drop(stopped.await);
            });
        });
        wait.recv().expect("everything listens");
        Self {
            namespace: namespace.clone(),
            log,
            stop: Some(stop),
            thread: Some(thread),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "a server failed");
        }
    }
}

async fn listen(log: &Log, plan: &Plan) {
    sniffer::listen(log);
    let services = Services {
        log: log.clone(),
        web: Web {
            log: log.clone(),
            files: Arc::new(plan.files.clone()),
        },
        resolver: Resolver {
            log: log.clone(),
            zone: plan.zone.clone(),
        },
        tls: plan.authority.acceptor(),
    };
    for (port, speaks) in TCP_PORTS {
        // Both versions of IP.
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await;
        let listener = listener.expect("a free port");
        tokio::spawn(accept(listener, services.clone(), speaks));
    }
    for address in &plan.resolvers {
        let socket = UdpSocket::bind((*address, DNS_PORT)).await;
        let resolver = services.resolver.clone();
        tokio::spawn(resolver.serve_udp(socket.expect("a free port")));
    }
    let udp = plan.udp.iter();
    let udp = udp.flat_map(|address| UDP_PORTS.map(|port| (*address, port)));
    let taken =
        |(address, port): &(Ipv4Addr, u16)| *port == DNS_PORT && plan.resolvers.contains(address);
    for address in udp.filter(|address| !taken(address)) {
        let socket = UdpSocket::bind(address).await.expect("a free port");
        tokio::spawn(repeat_datagrams(socket, log.clone()));
    }
}

async fn accept(listener: TcpListener, services: Services, speaks: Speaks) {
    loop {
        // One that is gone before it was accepted.
        let Ok((stream, peer)) = listener.accept().await else {
            continue;
        };
        let Ok(local) = stream.local_addr() else {
            continue;
        };
        drop(stream.set_nodelay(true));
        let canonical = |address: std::net::SocketAddr| {
            std::net::SocketAddr::new(address.ip().to_canonical(), address.port())
        };
        let open = services.log.open(canonical(local), canonical(peer));
        tokio::spawn(services.clone().speak(Heard { stream, open }, speaks));
    }
}

// === impl Services ===

impl Services {
    async fn speak(self, mut stream: Heard, speaks: Speaks) {
        let local = stream.open.local;
        match speaks {
            Speaks::Http => self.web.serve(stream, local, None).await,
            Speaks::Https => {
                let Ok(stream) = self.tls.accept(stream).await else {
                    return;
                };
                let name = stream.get_ref().1.server_name().map(str::to_owned);
                self.web.serve(stream, local, name).await;
            }
            Speaks::Echo => repeat(stream).await,
            Speaks::GreetingFirst => {
                if stream.write_all(b"SSH-2.0-miniature\r\n").await.is_ok() {
                    repeat(stream).await;
                }
            }
            Speaks::Dns => self.resolver.serve_stream(stream, local).await,
            Speaks::DnsOverTls => {
                if let Ok(stream) = self.tls.accept(stream).await {
                    self.resolver.serve_stream(stream, local).await;
                }
            }
        }
    }
}

async fn repeat<S>(stream: S)
where
    S: AsyncRead + AsyncWrite,
{
    let (mut reader, mut writer) = tokio::io::split(stream);
    // It ends when the other side does.
    drop(tokio::io::copy(&mut reader, &mut writer).await);
    drop(writer.shutdown().await);
}

async fn repeat_datagrams(socket: UdpSocket, log: Log) {
    let local = socket.local_addr().expect("an address");
    let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
    loop {
        // An error is about an answer that nobody waited for.
        let Ok((length, peer)) = socket.recv_from(&mut buffer).await else {
            continue;
        };
        log.datagram(local, &buffer[..length]);
        drop(socket.send_to(&buffer[..length], peer).await);
    }
}
