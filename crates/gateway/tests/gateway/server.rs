//! A gateway under test.

use k8e_api::client::{Client, ClientIdentity, ConnectError, Endpoint, TlsEndpoint};
use k8e_api::v1;
use k8e_driver::Driver;
use k8e_engine::Sessions;
use k8e_gateway::{
    Admin, BaseUrl, Config, Error, Expose, Gateway, Listeners, Metrics, RateLimits, Tcp,
};
use k8e_model::ApiKey;
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

/// Any free port.
const ANY_TCP: Tcp = Tcp {
    address: SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0),
    required: true,
    trust_loopback: false,
};

/// A process has one; the tests share it.
static METRICS: LazyLock<Metrics> = LazyLock::new(|| Metrics::install().unwrap());

/// A gateway that serves until it is stopped.
pub(crate) struct TestServer {
    dir: tempfile::TempDir,
    tcp: Option<SocketAddr>,
    admin: SocketAddr,
    expose: SocketAddr,
    sessions: Sessions,
    store: Store,
    driver: FakeDriver,
    limits: RateLimits,
    stop: Option<oneshot::Sender<()>>,
    served: JoinHandle<Result<(), Error>>,
}

// === impl TestServer ===

impl TestServer {
    /// With both gRPC listeners, the TLS one on any free port.
    pub(crate) async fn start() -> Self {
        Self::start_with(Some(ANY_TCP)).await.unwrap()
    }

    /// The same with `--trust-loopback`.
    pub(crate) async fn trusting_loopback() -> Self {
        let tcp = Tcp {
            trust_loopback: true,
            ..ANY_TCP
        };
        Self::start_with(Some(tcp)).await.unwrap()
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

    /// With the admin HTTP server on this address.
    pub(crate) async fn watched_at(address: SocketAddr) -> Result<Self, Error> {
        Self::start_at(FakeDriver::new(), None, address).await
    }

    pub(crate) async fn start_over(driver: FakeDriver, tcp: Option<Tcp>) -> Result<Self, Error> {
        Self::start_at(driver, tcp, "127.0.0.1:0".parse().unwrap()).await
    }

    /// With other rates.
    pub(crate) async fn limited(limits: RateLimits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let any = "127.0.0.1:0".parse().unwrap();
        Self::start_in(dir, FakeDriver::new(), Some(ANY_TCP), any, limits, None)
            .await
            .unwrap()
    }

    /// With URLs of exposed services that begin like this.
    pub(crate) async fn exposing_at(base_url: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let any = "127.0.0.1:0".parse().unwrap();
        let base = Some(base_url.parse().unwrap());
        let limits = RateLimits::default();
        Self::start_in(dir, FakeDriver::new(), None, any, limits, base)
            .await
            .unwrap()
    }

    /// Stops, and starts again on the same directory and sandboxes.
    pub(crate) async fn restart(mut self) -> Self {
        drop(self.stop.take());
        self.served.await.unwrap().unwrap();
        self.sessions.shutdown().await;
        self.store.close().await;
        let any = "127.0.0.1:0".parse().unwrap();
        let (dir, driver, limits) = (self.dir, self.driver, self.limits);
        Self::start_in(dir, driver, Some(ANY_TCP), any, limits, None)
            .await
            .unwrap()
    }

    async fn start_at(
        driver: FakeDriver,
        tcp: Option<Tcp>,
        address: SocketAddr,
    ) -> Result<Self, Error> {
        let dir = tempfile::tempdir().unwrap();
        Self::start_in(dir, driver, tcp, address, RateLimits::default(), None).await
    }

    async fn start_in(
        dir: tempfile::TempDir,
        driver: FakeDriver,
        tcp: Option<Tcp>,
        address: SocketAddr,
        limits: RateLimits,
        base_url: Option<BaseUrl>,
    ) -> Result<Self, Error> {
        let admin = Admin {
            address,
            metrics: METRICS.clone(),
        };
        let store = Store::open(dir.path()).await.unwrap();
        let drivers: Vec<Arc<dyn Driver>> = vec![Arc::new(driver.clone())];
        let sessions = Sessions::start(k8e_engine::Config::default(), store.clone(), drivers);
        let config = Config {
            socket: dir.path().join("k8e.sock"),
            socket_group: "k8e".to_owned(),
            tcp,
            tls_dir: dir.path().join("tls"),
            tls_links_dir: None,
            tls_names: Vec::new(),
            tls_check_every: Duration::from_millis(50),
            rate_limits: limits,
            admin: Some(admin),
            expose: Some(Expose {
                address: ANY_TCP.address,
                required: true,
                base_url,
            }),
            e2b: None,
        };
        let sessions = sessions.await.unwrap();
        let gateway = Gateway::open(config.clone(), Listeners::bind(&config)?, sessions.clone())?;
        let tcp = gateway.tcp_address();
        let admin = gateway.admin_address().unwrap();
        let expose = gateway.expose_address().unwrap();
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
            expose,
            sessions,
            store,
            driver,
            limits,
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

    pub(crate) fn expose(&self) -> SocketAddr {
        self.expose
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
        let identity = identity.map(|dir| ClientIdentity {
            cert_pem: read(dir, "client.crt"),
            key_pem: read(dir, "client.key"),
        });
        Client::connect(&self.endpoint(identity, None)).await
    }

    /// Over TLS, with this API key.
    pub(crate) async fn with_key(&self, key: &ApiKey) -> Client {
        let endpoint = self.endpoint(None, Some(key.clone()));
        Client::connect(&endpoint).await.unwrap()
    }

    pub(crate) fn endpoint(
        &self,
        identity: Option<ClientIdentity>,
        api_key: Option<ApiKey>,
    ) -> Endpoint {
        Endpoint::Tls(TlsEndpoint {
            authority: self.tcp.unwrap().to_string(),
            ca_pem: std::fs::read(self.admin_dir().join("ca.crt")).unwrap(),
            identity,
            api_key,
        })
    }

    /// A new API key.
    pub(crate) async fn key(&self, name: &str) -> ApiKey {
        self.key_for(name, &[]).await
    }

    /// A new API key with these tenants.
    pub(crate) async fn key_for(&self, name: &str, tenants: &[&str]) -> ApiKey {
        let request = v1::CreateKeyRequest {
            name: name.to_owned(),
            tenants: tenants.iter().map(|&tenant| tenant.to_owned()).collect(),
            ..Default::default()
        };
        let made = self.local().await.identity.create_key(request).await;
        ApiKey::parse(&made.unwrap().into_inner().secret).unwrap()
    }

    /// Revokes a key.
    pub(crate) async fn delete_key(&self, name: &str) {
        let id = name.to_owned();
        let request = v1::DeleteKeyRequest { id };
        let mut local = self.local().await;
        local.identity.delete_key(request).await.unwrap();
    }

    pub(crate) fn tls_dir(&self) -> PathBuf {
        self.dir.path().join("tls")
    }

    /// Asks it to stop; resolves when it has.
    pub(crate) async fn stop(mut self) -> Result<(), Error> {
        drop(self.stop.take());
        self.served.await.unwrap()
    }
}
