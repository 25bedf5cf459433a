//! Services that have a URL: who may have one, what their visitors must know, and the way to them.
//!
//! A service is found by session and port and opened by its token alone, for its visitors are nobody
//! that the server knows. What is exposed is also in the store, written before its owner is told,
//! so that a URL outlives the server; it never outlives its session.

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

/// Of one session: more than a person looks at, and few enough to list.
const PER_SESSION_MAX: usize = 32;

/// What a URL's path begins with, as K8E's.
pub const EXPOSE_PATH: &str = "/k8e/expose";

/// What URLs of exposed services begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExposeBase {
    /// All below one, each with a path of its own: `https://preview.example.com`.
    Path(String),
    /// Each with a host name, and so an origin, of its own, directly below a domain.
    Host {
        /// `http` or `https`.
        scheme: &'static str,
        /// With a port if it is not the scheme's: `sandboxes.example:8443`.
        domain: String,
    },
}

/// A service that has a URL, as its owner sees it.
#[derive(Clone, PartialEq, Eq)]
pub struct ExposedService {
    /// What it is.
    pub exposure: Exposure,
    /// With its token.
    pub url: String,
}

/// A service that somebody may use who knows its token.
#[derive(Clone)]
pub struct OpenPort {
    live: Arc<Live>,
    port: Port,
    host: ServiceHost,
    /// True when it is no longer exposed.
    cut: watch::Receiver<bool>,
    recorder: Recorder,
}

/// All that have a URL.
#[derive(Default)]
pub(crate) struct Exposures {
    /// Where the door to them is, for those who are not there yet; none without a door.
    base: OnceLock<ExposeBase>,
    map: Mutex<HashMap<(SessionId, Port), Entry>>,
    /// Held while what is in the store and in the map changes.
    turn: tokio::sync::Mutex<()>,
}

struct Entry {
    live: Arc<Live>,
    exposure: Exposure,
    cut: watch::Sender<bool>,
}

// === impl Sessions ===

impl Sessions {
    /// Says where the door to exposed services is. Once.
    pub fn serve_exposed_at(&self, base: ExposeBase) {
        let _ = self.shared.exposures.base.set(base);
    }

    /// Gives a service a URL, or tells the one it has; where it listens may change.
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
            self.in_the_background(async move { shared.expose(live, port, host).await })
                .await
        };
        audit.end(exposed.await)
    }

    /// Takes a service's URL back and cuts the connections to it. False when it had none.
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
            self.in_the_background(async move { shared.unexpose(&live, port).await })
                .await
        };
        audit.end(unexposed.await)
    }

    /// The services of a session that have a URL, by port.
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

    /// The service that one of these tokens opens. That there is none, that it has no URL and that
    /// no token is right are the same answer in the same time.
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

    /// Goes on when its caller goes away: what is half written down would come back after a restart.
    async fn in_the_background<T: Send + 'static>(
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
    /// Finds the services again whose sessions live on.
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

    /// What a session that is over exposed is not there any more.
    pub(crate) async fn forget_exposures(&self, live: &Arc<Live>) {
        let _turn = self.exposures.turn.lock().await;
        self.exposures
            .map()
            .retain(|_, entry| !Arc::ptr_eq(&entry.live, live));
        let session = &live.record.id;
        if let Err(error) = self.store.remove_exposures(session, None).await {
            tracing::warn!(%session, %error, "exposed services stay written down until the next start");
        }
    }

    async fn expose(
        &self,
        live: Arc<Live>,
        port: Port,
        host: ServiceHost,
    ) -> Result<ExposedService, Error> {
        let _turn = self.exposures.turn.lock().await;
        // Not before our turn: who ends a session takes one too, to forget what it exposed.
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
        // First: what only memory forgot would be back after a restart.
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

    /// One that changed keeps its connections.
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
    /// Whether a service can have a URL here.
    fn check(&self, session: &SessionId, port: Port) -> Result<(), Error> {
        match self {
            Self::Path(_) => Ok(()),
            Self::Host { .. } => {
                let label = ServiceLabel::new(session.clone(), port);
                label.map(drop).map_err(|e| Error::Invalid(e.message))
            }
        }
    }

    /// Without a slash at its end. None for one that was exposed when services had no host names, and cannot have one.
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
        // Without a door there is nothing to begin with; it may have one again after a restart.
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
