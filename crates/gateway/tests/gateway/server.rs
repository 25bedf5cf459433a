//! A gateway under test.

use k8e_api::client::{Client, ClientIdentity, ConnectError, Endpoint, TlsEndpoint};
use k8e_engine::Sessions;
use k8e_gateway::{Admin, Config, Error, Gateway, Metrics, Tcp};
use k8e_store::Store;
use k8e_testkit::{FakeDriver, Script, Step};
use k8e_wire::proto::request;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Whatever a test waits for comes by then, on a busy machine too.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A process has one; the tests share it.
static METRICS: LazyLock<Metrics> = LazyLock::new(|| Metrics::install().unwrap());

/// A gateway that serves until it is stopped.
pub(crate) struct TestServer {
    dir: tempfile::TempDir,
    tcp: Option<SocketAddr>,
    admin: SocketAddr,
    sessions: Sessions,
    store: Store,
    stop: Option<oneshot::Sender<()>>,
    served: JoinHandle<Result<(), Error>>,
}

// === impl TestServer ===

impl TestServer {
    /// With both doors, the TLS one on any free port.
    pub(crate) async fn start() -> Self {
        let any = Tcp {
            address: "127.0.0.1:0".parse().unwrap(),
            required: true,
        };
        Self::start_with(Some(any)).await.unwrap()
    }

    /// With guests that greet, and otherwise take everything and answer nothing.
    pub(crate) async fn stalling() -> Self {
        let script: Script = Arc::new(|call: &request::Call| {
            (!matches!(call, request::Call::Hello(_))).then(|| vec![Step::Stall])
        });
        let driver = FakeDriver::scripted(script);
        Self::start_over(driver, None).await.unwrap()
    }

    pub(crate) async fn start_with(tcp: Option<Tcp>) -> Result<Self, Error> {
        Self::start_over(FakeDriver::new(), tcp).await
    }

    /// Watched from this address.
    pub(crate) async fn watched_at(address: SocketAddr) -> Result<Self, Error> {
        Self::start_at(FakeDriver::new(), None, address).await
    }

    pub(crate) async fn start_over(driver: FakeDriver, tcp: Option<Tcp>) -> Result<Self, Error> {
        Self::start_at(driver, tcp, "127.0.0.1:0".parse().unwrap()).await
    }

    async fn start_at(
        driver: FakeDriver,
        tcp: Option<Tcp>,
        address: SocketAddr,
    ) -> Result<Self, Error> {
        let admin = Admin {
            address,
            metrics: METRICS.clone(),
        };
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).await.unwrap();
        let driver = Arc::new(driver);
        let sessions = Sessions::start(k8e_engine::Config::default(), store.clone(), vec![driver]);
        let config = Config {
            socket: dir.path().join("k8e.sock"),
            socket_group: "k8e".to_owned(),
            tcp,
            tls_dir: dir.path().join("tls"),
            admin: Some(admin),
        };
        let sessions = sessions.await.unwrap();
        let gateway = Gateway::bind(config, sessions.clone()).await?;
        let tcp = gateway.tcp_address();
        let admin = gateway.admin_address().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let served = tokio::spawn(async move {
            Box::pin(gateway.serve(async {
                let _ = stopped.await;
            }))
            .await
        });
        Ok(Self {
            dir,
            tcp,
            admin,
            sessions,
            store,
            stop: Some(stop),
            served,
        })
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("k8e.sock")
    }

    pub(crate) fn tcp(&self) -> Option<SocketAddr> {
        self.tcp
    }

    pub(crate) fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// From now on the store fails.
    pub(crate) async fn close_store(&self) {
        self.store.close().await;
    }

    pub(crate) fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    pub(crate) async fn local(&self) -> Client {
        Client::connect(&Endpoint::Unix(self.socket()))
            .await
            .unwrap()
    }

    pub(crate) fn admin_dir(&self) -> PathBuf {
        self.dir.path().join("tls/admin")
    }

    /// Over TLS, with the certificate that is in `identity`, if any.
    pub(crate) async fn remote(&self, identity: Option<&Path>) -> Result<Client, ConnectError> {
        let read = |dir: &Path, name: &str| std::fs::read(dir.join(name)).unwrap();
        let endpoint = Endpoint::Tls(TlsEndpoint {
            authority: self.tcp.unwrap().to_string(),
            ca_pem: read(&self.admin_dir(), "ca.crt"),
            identity: identity.map(|dir| ClientIdentity {
                cert_pem: read(dir, "client.crt"),
                key_pem: read(dir, "client.key"),
            }),
        });
        Client::connect(&endpoint).await
    }

    /// Asks it to stop; resolves when it has.
    pub(crate) async fn stop(mut self) -> Result<(), Error> {
        drop(self.stop.take());
        self.served.await.unwrap()
    }
}
