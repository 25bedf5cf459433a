//! Exposed services: URLs, bearer tokens and connections to ports of a sandbox.
//!
//! A service is looked up by session and port and authorized by its token alone, as its visitors have
//! no credentials of the server. Exposures are stored before their URL is returned, so that a URL
//! survives a restart of the server; it never outlives its session.

mod connection;

pub use connection::PortConnection;

use crate::live::Live;
use crate::metrics;
use crate::recorder::{Recorder, now_ms};
use crate::sessions::Shared;
use crate::{Error, Sessions};
use k8e_model::{Exposure, Port, Principal, ServiceHost, ServiceLabel, ServiceToken, SessionId};
use serde_json::json;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::sync::watch;

/// Exposed services per session: few enough to list.
const PER_SESSION_MAX: usize = 32;

/// Prefix of a URL's path, the same as in the Go K8E.
pub const EXPOSE_PATH: &str = "/k8e/expose";

/// Base of the URLs of exposed services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExposeBase {
    /// Path-based: one origin, a path per service: `https://preview.example.com`.
    Path(String),
    /// Host-based: a host name, and so an origin, per service, directly below a domain.
    Host {
        /// `http` or `https`.
        scheme: &'static str,
        /// With a port if it is not the scheme's: `sandboxes.example:8443`.
        domain: String,
    },
}

/// An exposed service, as its owner sees it.
#[derive(Clone, PartialEq, Eq)]
pub struct ExposedService {
    /// Its record.
    pub exposure: Exposure,
    /// URL with its token.
    pub url: String,
}

/// Authorized access to an exposed service, which a valid token gave.
#[derive(Clone)]
pub struct OpenPort {
    live: Arc<Live>,
    port: Port,
    host: ServiceHost,
    /// True when it is no longer exposed: its connections are closed.
    cut: watch::Receiver<bool>,
    recorder: Recorder,
}

/// Registry of exposed services.
#[derive(Default)]
pub(crate) struct Exposures {
    /// Base of their URLs; unset without a listener for exposed services.
    base: OnceLock<ExposeBase>,
    map: Mutex<HashMap<(SessionId, Port), Entry>>,
    /// Serializes changes of store and map.
    turn: tokio::sync::Mutex<()>,
    /// Stays false: of ports that are not exposed, and so cannot stop to be.
    never_cut: watch::Sender<bool>,
}

struct Entry {
    live: Arc<Live>,
    exposure: Exposure,
    cut: watch::Sender<bool>,
}

// === impl Sessions ===

impl Sessions {
    /// Sets the base of the URLs of exposed services. Later calls have no effect.
    pub fn serve_exposed_at(&self, base: ExposeBase) {
        let _ = self.shared.exposures.base.set(base);
    }

    /// Exposes a service, or returns the URL it has; its host may change.
    pub async fn expose(
        &self,
        who: &Principal,
        session: &SessionId,
        port: Port,
        host: ServiceHost,
    ) -> Result<ExposedService, Error> {
        let audit = self.audited(who, "service.expose", &format!("{session}:{port}"));
        let exposed = async {
            let live = self.live(who, session).await?;
            self.shared.exposures.base()?.check(session, port)?;
            let shared = Arc::clone(&self.shared);
            self.in_own_task(async move { shared.expose(live, port, host).await })
                .await
        };
        audit.end(exposed.await)
    }

    /// Revokes a service's URL and closes its connections. False when it was not exposed.
    pub async fn unexpose(
        &self,
        who: &Principal,
        session: &SessionId,
        port: Port,
    ) -> Result<bool, Error> {
        let audit = self.audited(who, "service.unexpose", &format!("{session}:{port}"));
        let unexposed = async {
            let live = self.live(who, session).await?;
            let shared = Arc::clone(&self.shared);
            self.in_own_task(async move { shared.unexpose(&live, port).await })
                .await
        };
        audit.end(unexposed.await)
    }

    /// The exposed services of a session, by port.
    pub async fn exposed(
        &self,
        who: &Principal,
        session: &SessionId,
    ) -> Result<Vec<ExposedService>, Error> {
        let live = self.live(who, session).await?;
        let exposures = &self.shared.exposures;
        let mut own = exposures.of(&live);
        own.sort_by_key(|exposure| exposure.port);
        let base = exposures.base.get();
        Ok(own
            .into_iter()
            .map(|exposure| ExposedService::new(exposure, base))
            .collect())
    }

    /// The service that one of these tokens authorizes. No such session, not exposed, and no valid
    /// token give the same result in the same time.
    pub fn open_port(
        &self,
        session: &SessionId,
        port: Port,
        tokens: &[ServiceToken],
    ) -> Option<OpenPort> {
        let exposures = self.shared.exposures.map();
        let entry = exposures.get(&(session.clone(), port));
        let wanted = entry.map_or(&ServiceToken::NOBODYS, |entry| &entry.exposure.token);
        let right = tokens
            .iter()
            .fold(false, |right, token| right | (token == wanted));
        let entry = entry.filter(|_| right)?;
        Some(OpenPort {
            live: Arc::clone(&entry.live),
            port,
            host: entry.exposure.host.clone(),
            cut: entry.cut.subscribe(),
            recorder: self.shared.recorder.clone(),
        })
    }

    /// A port of one's own session, exposed or not: for a client that was authenticated in another way than by a
    /// service's token.
    pub async fn own_port(
        &self,
        who: &Principal,
        session: &SessionId,
        port: Port,
    ) -> Result<OpenPort, Error> {
        let live = self.live(who, session).await?;
        Ok(OpenPort {
            live,
            port,
            host: ServiceHost::default(),
            cut: self.shared.exposures.never_cut.subscribe(),
            recorder: self.shared.recorder.clone(),
        })
    }

    /// Runs a change in its own task, to the end also when the caller disconnects: a half-stored exposure would
    /// come back after a restart.
    async fn in_own_task<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let Ok(held) = Arc::clone(&self.shared.work).try_read_owned() else {
            return Err(Error::Stopping);
        };
        let done = self.shared.runtime.spawn(async move {
            let _held = held;
            work.await
        });
        done.await.unwrap_or(Err(Error::Stopping))
    }
}

// === impl Shared ===

impl Shared {
    /// Crash recovery: restores the exposures of adopted sessions.
    pub(crate) async fn restore_exposures(&self) -> Result<(), Error> {
        for exposure in self.store.exposures().await? {
            match self.find_any(&exposure.session) {
                Some(live) => self.exposures.add(&live, exposure),
                None => {
                    let session = &exposure.session;
                    self.store.remove_exposures(session, None).await?;
                }
            }
        }
        Ok(())
    }

    /// Removes the exposures of an ended session.
    pub(crate) async fn forget_exposures(&self, live: &Arc<Live>) {
        let _turn = self.exposures.turn.lock().await;
        self.exposures
            .map()
            .retain(|_, entry| !Arc::ptr_eq(&entry.live, live));
        let session = &live.record.id;
        if let Err(error) = self.store.remove_exposures(session, None).await {
            tracing::warn!(%session, %error, "exposures cannot be removed from the store until the next start");
        }
    }

    async fn expose(
        &self,
        live: Arc<Live>,
        port: Port,
        host: ServiceHost,
    ) -> Result<ExposedService, Error> {
        let _turn = self.exposures.turn.lock().await;
        // Checked under the lock: the end of a session takes it too, to remove its exposures.
        live.check_active()?;
        let own = self.exposures.of(&live);
        let known = own.iter().find(|exposure| exposure.port == port);
        if known.is_none() && own.len() >= PER_SESSION_MAX {
            return Err(metrics::refused(Error::SessionBusy {
                id: live.record.id.clone(),
                what: "exposed services",
                max: PER_SESSION_MAX,
            }));
        }
        let exposure = match known {
            Some(known) if known.host == host => known.clone(),
            Some(known) => Exposure {
                host,
                ..known.clone()
            },
            None => Exposure {
                session: live.record.id.clone(),
                port,
                host,
                token: ServiceToken::random(),
                started_at: now_ms(),
            },
        };
        if known != Some(&exposure) {
            self.store.set_exposure(&exposure).await?;
            self.exposures.add(&live, exposure.clone());
            let detail = json!({ "port": port.get(), "host": exposure.host.as_str() });
            self.recorder.event(&live.record, "service_exposed", detail);
        }
        Ok(ExposedService::new(exposure, Some(self.exposures.base()?)))
    }

    async fn unexpose(&self, live: &Arc<Live>, port: Port) -> Result<bool, Error> {
        let _turn = self.exposures.turn.lock().await;
        let own = self.exposures.of(live);
        if !own.iter().any(|exposure| exposure.port == port) {
            return Ok(false);
        }
        let session = &live.record.id;
        // Store before memory: an exposure removed only from memory would be back after a restart.
        self.store.remove_exposures(session, Some(port)).await?;
        self.exposures.map().remove(&(session.clone(), port));
        let detail = json!({ "port": port.get() });
        self.recorder
            .event(&live.record, "service_unexposed", detail);
        Ok(true)
    }
}

// === impl Exposures ===

impl Exposures {
    fn base(&self) -> Result<&ExposeBase, Error> {
        self.base.get().ok_or(Error::NoExposeDoor)
    }

    /// Adds or updates an exposure; an update keeps its connections.
    fn add(&self, live: &Arc<Live>, exposure: Exposure) {
        let key = (exposure.session.clone(), exposure.port);
        let mut map = self.map();
        let before = map
            .remove(&key)
            .filter(|entry| Arc::ptr_eq(&entry.live, live));
        let entry = Entry {
            live: Arc::clone(live),
            exposure,
            cut: before.map_or_else(|| watch::Sender::new(false), Entry::into_cut),
        };
        map.insert(key, entry);
    }

    fn of(&self, live: &Arc<Live>) -> Vec<Exposure> {
        let map = self.map();
        let own = map.values().filter(|entry| Arc::ptr_eq(&entry.live, live));
        own.map(|entry| entry.exposure.clone()).collect()
    }

    fn map(&self) -> MutexGuard<'_, HashMap<(SessionId, Port), Entry>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Entry ===

impl Entry {
    fn into_cut(self) -> watch::Sender<bool> {
        self.cut
    }
}

// === impl ExposeBase ===

impl ExposeBase {
    /// Checks that a service can have a URL with this base.
    fn check(&self, session: &SessionId, port: Port) -> Result<(), Error> {
        match self {
            Self::Path(_) => Ok(()),
            Self::Host { .. } => {
                let label = ServiceLabel::new(session.clone(), port);
                label.map(drop).map_err(|e| Error::Invalid(e.message))
            }
        }
    }

    /// URL without a trailing slash. None for a service exposed under a path base that has no valid host name.
    fn url(&self, session: &SessionId, port: Port) -> Option<String> {
        match self {
            Self::Path(base) => Some(format!("{base}{EXPOSE_PATH}/{session}/{port}")),
            Self::Host { scheme, domain } => {
                let label = ServiceLabel::new(session.clone(), port).ok()?;
                Some(format!("{scheme}://{label}.{domain}"))
            }
        }
    }
}

// === impl ExposedService ===

impl ExposedService {
    fn new(exposure: Exposure, base: Option<&ExposeBase>) -> Self {
        let Exposure { session, port, .. } = &exposure;
        let token = exposure.token.reveal();
        // Without a listener there is no base; there may be one again after a restart.
        let place = match base {
            Some(base) => base.url(session, *port),
            None => Some(format!("{EXPOSE_PATH}/{session}/{port}")),
        };
        let url = place.map_or_else(String::new, |place| format!("{place}/?k8e_token={token}"));
        Self { exposure, url }
    }
}

/// Without the URL, which has the token.
impl fmt::Debug for ExposedService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExposedService")
            .field("exposure", &self.exposure)
            .finish_non_exhaustive()
    }
}

// === impl OpenPort ===

impl fmt::Debug for OpenPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenPort")
            .field("session", &self.live.record.id)
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}
