//! Login: issues a client certificate for an API key, for both APIs.

use super::tls::{CERT_LIFETIME, ForClient, Tls};
use super::{Credential, principal};
use k8e_api::status::to_status;
use k8e_engine::Sessions;
use k8e_model::{Code, KeyId, UnixMillis};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tonic::{Request, Status};

/// A certificate request is a key, a name and a signature: under a kilobyte with P-256.
const CSR_BYTES_MAX: usize = 16 * 1024;

/// Characters of a device's name in the audit log.
const DEVICE_CHARS_MAX: usize = 64;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Issues client certificates. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Login {
    sessions: Sessions,
    /// None when the server has no TLS listener.
    tls: Option<Arc<Tls>>,
}

/// The answer to a login.
pub(crate) struct Granted {
    /// The client certificate, PEM.
    pub(crate) cert: String,
    /// The authority's certificate, PEM: it signed this one and the server's.
    pub(crate) ca_cert: String,
    pub(crate) valid_days: i64,
}

// === impl Login ===

impl Login {
    pub(crate) fn new(sessions: Sessions, tls: Option<Arc<Tls>>) -> Self {
        Self { sessions, tls }
    }

    /// A certificate for the API key that `request` was authenticated with.
    pub(crate) fn grant<T>(
        &self,
        request: &Request<T>,
        csr: &str,
        device_name: &str,
    ) -> Result<Granted, Status> {
        let who = principal(request)?;
        let key = login_key(request.extensions().get())?;
        let device = device(device_name);
        let mut audit = self.sessions.audited(&who, "login", &device);
        let answer = self.certificate(&key, csr);
        let code = answer.as_ref().map(drop).map_err(|(code, _)| *code);
        if let Ok((_, serial)) = &answer {
            audit.about(&format!("{serial} {device}"));
        }
        audit.end_with(code);
        match answer {
            Ok((granted, _)) => Ok(granted),
            Err((code, message)) => Err(to_status(code, &message)),
        }
    }

    /// The server's certificate for the next handshake, as PEM.
    pub(crate) fn server_cert(&self) -> Result<String, Status> {
        let tls = self.tls.as_ref();
        let tls = tls.ok_or_else(|| to_status(Code::Unsupported, NO_TLS))?;
        Ok(tls.shown_pem())
    }

    /// A certificate that expires with its key at the latest, and its serial number.
    fn certificate(&self, key: &KeyId, csr: &str) -> Result<(Granted, String), (Code, String)> {
        let tls = self.tls.as_ref();
        let tls = tls.ok_or_else(|| (Code::Unsupported, NO_TLS.to_owned()))?;
        if csr.len() > CSR_BYTES_MAX {
            let message = format!("a certificate request has at most {CSR_BYTES_MAX} bytes");
            return Err((Code::Invalid, message));
        }
        let key = self.sessions.valid_key(key);
        let key = key.map_err(|e| (e.code(), e.to_string()))?;
        let lifetime = lifetime(key.expires_at, now_ms());
        let client = ForClient {
            name: key.name.as_str(),
            key: &key.id,
            lifetime,
        };
        let signed = tls.sign(csr, &client);
        let (cert, serial) = signed.map_err(|message| (Code::Invalid, message))?;
        let granted = Granted {
            cert,
            ca_cert: tls.ca_pem().to_owned(),
            valid_days: i64::try_from(lifetime.as_secs() / DAY.as_secs()).unwrap_or(i64::MAX),
        };
        Ok((granted, serial))
    }
}

const NO_TLS: &str = "this server takes no clients over TLS: start it with --listen";

/// The API key of a client: its credential, or what its certificate was issued for.
fn login_key(credential: Option<&Credential>) -> Result<KeyId, Status> {
    let key = match credential {
        Some(Credential::Key(id)) => Some(id),
        Some(Credential::Certificate(certificate)) => certificate.key.as_ref(),
        Some(Credential::Kernel) | None => None,
    };
    key.cloned().ok_or_else(|| {
        to_status(
            Code::Denied,
            "missing API key: only its holder can log in; make one with `k8e apikey create`",
        )
    })
}

fn lifetime(key_ends: Option<UnixMillis>, now: UnixMillis) -> Duration {
    let left = key_ends.map(|at| u64::try_from(at - now).unwrap_or(0));
    left.map_or(CERT_LIFETIME, |ms| {
        Duration::from_millis(ms).min(CERT_LIFETIME)
    })
}

/// A device's name without control characters, for a line of the audit log.
fn device(name: &str) -> String {
    let plain = |c: &char| !c.is_control();
    name.chars().filter(plain).take(DEVICE_CHARS_MAX).collect()
}

fn now_ms() -> UnixMillis {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    i64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_ends_with_its_key() {
        assert_eq!(lifetime(None, 5), CERT_LIFETIME);
        assert_eq!(lifetime(Some(i64::MAX), 5), CERT_LIFETIME);
        assert_eq!(lifetime(Some(1005), 5), Duration::from_secs(1));
        assert_eq!(lifetime(Some(1), 5), Duration::ZERO);
    }

    #[test]
    fn a_device_is_a_line() {
        assert_eq!(device("my\nlaptop\u{1b}[2J"), "mylaptop[2J");
        assert_eq!(device(&"é".repeat(100)).chars().count(), DEVICE_CHARS_MAX);
    }
}
