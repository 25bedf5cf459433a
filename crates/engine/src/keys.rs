//! API keys and the certificates that were given for them: who holds one, and whether it still counts.
//!
//! Every call asks, so the answer comes from memory: all keys, by the beginning of their hash. A
//! deletion changes memory and the store in one call, so it counts from the next call on and after
//! a restart. A certificate names the key that it was given for and counts as long as that key.

use crate::recorder::now_ms;
use crate::{Error, Sessions};
use k8e_model::{ApiKey, KeyHash, KeyId, Principal, PrincipalName, Tenants, UnixMillis};
use k8e_store::{KeyRecord, Store};
use ring::digest::{SHA256, digest};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use tokio::sync::watch;

/// All of them are in memory, some hundred bytes each.
const KEYS_MAX: usize = 10_000;

/// A certificate lives 90 days: one that was revoked before that has ended by itself.
const REVOKED_KEPT: Duration = Duration::from_secs(100 * 24 * 3600);

/// How exactly a key's last use is known: a busy key must not write all the time.
const USED_EVERY_MS: i64 = 60_000;

/// What a key shall be.
#[derive(Clone, Debug)]
pub struct NewKey {
    /// What its maker calls it.
    pub name: PrincipalName,
    /// Who its holder is; none is somebody of the same name.
    pub principal: Option<PrincipalName>,
    /// The tenants that its holder may make sessions for; none is one of the key's own.
    pub tenants: Option<Tenants>,
    /// How long it counts; none is for ever.
    pub expires_in: Option<Duration>,
}

/// A key, as it is shown: without the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyView {
    /// Names it.
    pub id: KeyId,
    /// What its maker calls it.
    pub name: PrincipalName,
    /// Who its holder is.
    pub principal: PrincipalName,
    /// The tenants that its holder may make sessions for.
    pub tenants: Tenants,
    /// When it was made.
    pub created_at: UnixMillis,
    /// From then on it is refused; none is never.
    pub expires_at: Option<UnixMillis>,
    /// When a call last had it, to the minute.
    pub last_used: Option<UnixMillis>,
    /// Whether its time is over.
    pub expired: bool,
}

/// A certificate of ours, as a handshake proved it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Its number, in hexadecimal digits.
    pub serial: String,
    /// For whom.
    pub common_name: String,
    /// From then on it does not count, also on connections that were made before.
    pub ends_at: UnixMillis,
    /// The key that it was given for; none for one that the server made by itself.
    pub key: Option<KeyId>,
}

/// The keys of a server.
pub(crate) struct Keys {
    view: RwLock<View>,
    /// Counts what was taken back.
    taken_back: watch::Sender<u64>,
    /// Held while a key is made, so that no two have one place.
    making: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct View {
    by_id: HashMap<KeyId, Arc<Held>>,
    /// By the beginning of the hash; the rest is compared in constant time.
    by_hash: HashMap<[u8; 8], Arc<Held>>,
    revoked: HashSet<String>,
}

struct Held {
    record: KeyRecord,
    used: AtomicI64,
    /// Refused from now on, whether or not that could be written down.
    deleted: AtomicBool,
}

// === impl Sessions ===

impl Sessions {
    /// Makes a key. It is in the answer and nowhere else. For administrators.
    pub async fn create_key(
        &self,
        who: &Principal,
        new: NewKey,
    ) -> Result<(KeyView, ApiKey), Error> {
        let audit = self.audited(who, "key.create", new.name.as_str());
        audit.end(self.make_key(who, new).await)
    }

    async fn make_key(&self, who: &Principal, new: NewKey) -> Result<(KeyView, ApiKey), Error> {
        self.administrator(who, "API keys are made")?;
        let keys = &self.shared.keys;
        let _making = keys.making.lock().await;
        if keys.view().by_id.len() >= KEYS_MAX {
            return Err(Error::KeysFull { max: KEYS_MAX });
        }
        let now = now_ms();
        let key = ApiKey::random();
        let lifetime_ms = new.expires_in.map(|time| i64::try_from(time.as_millis()));
        let id = KeyId::random();
        let record = KeyRecord {
            tenants: new
                .tenants
                .unwrap_or_else(|| Tenants::of_key(&new.name, &id)),
            id,
            principal: new.principal.unwrap_or_else(|| new.name.clone()),
            name: new.name,
            hash: hash(&key),
            created_at: now,
            expires_at: lifetime_ms.map(|ms| now.saturating_add(ms.unwrap_or(i64::MAX))),
            last_used: None,
        };
        self.shared.store.insert_key(&record).await?;
        let held = Arc::new(Held::new(record));
        keys.view_mut().insert(&held);
        Ok((held.view(now), key))
    }

    /// All keys, the oldest first. For administrators.
    pub fn list_keys(&self, who: &Principal) -> Result<Vec<KeyView>, Error> {
        self.administrator(who, "API keys are listed")?;
        let now = now_ms();
        let view = self.shared.keys.view();
        let mut keys: Vec<_> = view.by_id.values().map(|held| held.view(now)).collect();
        drop(view);
        keys.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        Ok(keys)
    }

    /// Deletes a key, by id or by name: it and every certificate that was given for it are refused
    /// from the next call on, and calls under way with them end. For administrators.
    pub async fn delete_key(&self, who: &Principal, named: &str) -> Result<KeyView, Error> {
        let mut audit = self.audited(who, "key.delete", named);
        if let Err(error) = self.administrator(who, "API keys are deleted") {
            return audit.end(Err(error));
        }
        let keys = &self.shared.keys;
        let Some(held) = keys.named(named) else {
            return audit.end(Err(Error::KeyNotFound(named.to_owned())));
        };
        audit.about(&format!("{} ({})", held.record.id, held.record.name));
        // Memory first: a full disk must not keep a key alive.
        held.deleted.store(true, Ordering::SeqCst);
        keys.tell();
        let deleted = self
            .shared
            .store
            .delete_key(&held.record.id, now_ms())
            .await;
        if deleted.is_ok() {
            keys.view_mut().remove(&held);
        }
        audit.end(deleted.map(|_| held.view(now_ms())).map_err(Error::from))
    }

    /// Refuses a certificate from the next call on. For administrators.
    pub async fn revoke_certificate(&self, who: &Principal, serial: &str) -> Result<(), Error> {
        let audit = self.audited(who, "certificate.revoke", serial);
        audit.end(self.take_back(who, serial).await)
    }

    async fn take_back(&self, who: &Principal, serial: &str) -> Result<(), Error> {
        self.administrator(who, "certificates are revoked")?;
        let serial = canonical_serial(serial)?;
        let keys = &self.shared.keys;
        keys.view_mut().revoked.insert(serial.clone());
        keys.tell();
        Ok(self
            .shared
            .store
            .revoke_certificate(&serial, now_ms())
            .await?)
    }

    /// Whose key this is. What is no key, or none any more, is not told apart.
    pub fn verify_key(&self, key: &ApiKey) -> Result<(Principal, KeyId), Error> {
        let hash = hash(key);
        let found = self.shared.keys.view().by_hash.get(&prefix(&hash)).cloned();
        let now = now_ms();
        let held = found
            .filter(|held| held.record.hash == hash && held.counts(now))
            .ok_or(Error::KeyInvalid)?;
        if held.mark_used(now) {
            self.shared.recorder.key_used(&held.record.id, now);
        }
        Ok((held.principal(), held.record.id.clone()))
    }

    /// Whose certificate this is, if it still counts.
    pub fn verify_certificate(&self, certificate: &Certificate) -> Result<Principal, Error> {
        let view = self.shared.keys.view();
        if view.revoked.contains(&certificate.serial) {
            return Err(Error::CertificateRevoked);
        }
        let now = now_ms();
        if certificate.ends_at <= now {
            return Err(Error::CertificateExpired);
        }
        let Some(key) = &certificate.key else {
            return Ok(Principal::certificate(&certificate.common_name));
        };
        match view.by_id.get(key) {
            Some(held) if held.counts(now) => Ok(held.principal()),
            _ => Err(Error::CertificateRevoked),
        }
    }

    /// A key that counts now.
    pub fn valid_key(&self, id: &KeyId) -> Result<KeyView, Error> {
        let now = now_ms();
        match self.shared.keys.view().by_id.get(id) {
            Some(held) if held.counts(now) => Ok(held.view(now)),
            _ => Err(Error::KeyInvalid),
        }
    }

    /// Changes whenever a key or certificate was taken back.
    pub fn credentials(&self) -> watch::Receiver<u64> {
        self.shared.keys.taken_back.subscribe()
    }
}

// === impl Keys ===

impl Keys {
    pub(crate) async fn load(store: &Store) -> Result<Self, Error> {
        let kept = i64::try_from(REVOKED_KEPT.as_millis()).unwrap_or(i64::MAX);
        let mut view = View {
            revoked: store.revoked_certificates(now_ms() - kept).await?,
            ..View::default()
        };
        for record in store.keys().await? {
            view.insert(&Arc::new(Held::new(record)));
        }
        Ok(Self {
            view: RwLock::new(view),
            taken_back: watch::Sender::new(0),
            making: tokio::sync::Mutex::default(),
        })
    }

    fn named(&self, named: &str) -> Option<Arc<Held>> {
        let is = |held: &&Arc<Held>| {
            held.record.id.as_str() == named || held.record.name.as_str() == named
        };
        self.view().by_id.values().find(is).cloned()
    }

    fn tell(&self) {
        self.taken_back.send_modify(|count| *count += 1);
    }

    fn view(&self) -> RwLockReadGuard<'_, View> {
        self.view.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn view_mut(&self) -> RwLockWriteGuard<'_, View> {
        self.view.write().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl View ===

impl View {
    fn insert(&mut self, held: &Arc<Held>) {
        self.by_id.insert(held.record.id.clone(), Arc::clone(held));
        self.by_hash
            .insert(prefix(&held.record.hash), Arc::clone(held));
    }

    fn remove(&mut self, held: &Held) {
        self.by_id.remove(&held.record.id);
        self.by_hash.remove(&prefix(&held.record.hash));
    }
}

// === impl Held ===

impl Held {
    fn new(record: KeyRecord) -> Self {
        Self {
            used: AtomicI64::new(record.last_used.unwrap_or(0)),
            deleted: AtomicBool::new(false),
            record,
        }
    }

    /// Who its holder is.
    fn principal(&self) -> Principal {
        let KeyRecord {
            id,
            principal,
            tenants,
            ..
        } = &self.record;
        Principal::user(principal, id.clone(), tenants.clone())
    }

    fn counts(&self, now: UnixMillis) -> bool {
        !self.deleted.load(Ordering::SeqCst) && !self.expired(now)
    }

    fn expired(&self, now: UnixMillis) -> bool {
        self.record.expires_at.is_some_and(|at| at <= now)
    }

    /// Whether that is worth writing down.
    fn mark_used(&self, now: UnixMillis) -> bool {
        let before = self.used.load(Ordering::Relaxed);
        now - before >= USED_EVERY_MS
            && self
                .used
                .compare_exchange(before, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    fn view(&self, now: UnixMillis) -> KeyView {
        let KeyRecord {
            id,
            name,
            principal,
            tenants,
            hash: _,
            created_at,
            expires_at,
            last_used: _,
        } = self.record.clone();
        let used = self.used.load(Ordering::Relaxed);
        KeyView {
            id,
            name,
            principal,
            tenants,
            created_at,
            expires_at,
            last_used: (used > 0).then_some(used),
            expired: self.expired(now),
        }
    }
}

fn hash(key: &ApiKey) -> KeyHash {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, key.as_bytes()).as_ref());
    KeyHash(hash)
}

fn prefix(hash: &KeyHash) -> [u8; 8] {
    let [a, b, c, d, e, f, g, h, ..] = hash.0;
    [a, b, c, d, e, f, g, h]
}

/// As a certificate's number is compared: hexadecimal digits without colons or leading zeros.
fn canonical_serial(text: &str) -> Result<String, Error> {
    let digits: String = text.chars().filter(|c| *c != ':').collect();
    let digits = digits.trim_start_matches('0').to_ascii_lowercase();
    // RFC 5280 has 20 bytes at most.
    if digits.is_empty() || digits.len() > 40 || !digits.chars().all(|c| c.is_ascii_hexdigit()) {
        return Err(Error::Invalid(
            "a certificate's serial number is up to 40 hexadecimal digits, as the audit shows it"
                .to_owned(),
        ));
    }
    Ok(digits)
}
