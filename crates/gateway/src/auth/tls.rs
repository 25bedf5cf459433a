//! The server's own certificate authority (CA) and the certificates it signs.
//!
//! Flow: the CA is created once and kept; the server's and the admin's certificates are renewed, at start and while the
//! server runs, when they are missing, of another CA, near expiry, or (the server's) lack a name of this machine. Open
//! connections stay as they are; the next handshake has the new certificate. File names are those that `sandbox.v1`
//! clients know.

mod files;
pub(super) mod fuzzing;
mod issue;
pub(crate) mod names;

pub(crate) use issue::{CERT_LIFETIME, ForClient};

use crate::Error;
use issue::Authority;
use k8e_engine::Certificate;
use names::Name;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{
    ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// A certificate that expires sooner than this is renewed.
const RENEW_BEFORE_S: i64 = 30 * 24 * 3600;

/// Names under which `sandbox.v1` clients look for the authority: those of today and of the first
/// generation.
const LINKS: [&str; 2] = ["sandbox-ca.crt", "serving-kube-apiserver.crt"];

/// The name in the admin's certificate, and so the owner of what it makes.
const ADMIN: &str = "admin";

/// The CA, and the server's current certificate.
pub(crate) struct Tls {
    dir: PathBuf,
    authority: Authority,
    current: Arc<Current>,
}

/// The server's certificate for the next handshake.
#[derive(Debug)]
struct Current(RwLock<Shown>);

#[derive(Debug)]
struct Shown {
    pem: String,
    key: Arc<CertifiedKey>,
}

// === impl Tls ===

impl Tls {
    /// Reads the certificates in `dir`, and issues those that are missing or near expiry.
    pub(crate) fn open(dir: &Path, names: &[Name]) -> Result<Self, Error> {
        files::make_dir(dir)?;
        files::make_dir(&dir.join("admin"))?;
        let ca_path = (dir.join("sandbox-ca.crt"), dir.join("sandbox-ca.key"));
        let (authority, ca_is_new) = match (files::read(&ca_path.0)?, files::read(&ca_path.1)?) {
            (Some(cert), Some(key)) => (Authority::load(cert, &key, dir)?, false),
            _ => (Authority::generate(dir)?, true),
        };
        if ca_is_new {
            files::write_key(&ca_path.1, &authority.key_pem())?;
            files::write(&ca_path.0, authority.cert_pem())?;
        }
        let server = server_certificate(dir, &authority, ca_is_new, names)?;
        admin_certificate(dir, &authority, ca_is_new)?;
        let shown = Shown::load(server, dir)?;
        Ok(Self {
            dir: dir.to_owned(),
            authority,
            current: Arc::new(Current(RwLock::new(shown))),
        })
    }

    /// Renews what is missing, near expiry, or lacks a name. Returns whether the server's certificate changed. The CA
    /// stays: all clients trust it.
    pub(crate) fn refresh(&self, names: &[Name]) -> Result<bool, Error> {
        admin_certificate(&self.dir, &self.authority, false)?;
        let server = server_certificate(&self.dir, &self.authority, false, names)?;
        if server.cert_pem == self.current.pem() {
            return Ok(false);
        }
        let shown = Shown::load(server, &self.dir)?;
        *self
            .current
            .0
            .write()
            .unwrap_or_else(PoisonError::into_inner) = shown;
        Ok(true)
    }

    /// Links to the authority under the names that `sandbox.v1` clients on this machine look for in
    /// `dir`. A file of that name belongs to another program and stays.
    pub(crate) fn link_authority(&self, dir: &Path) -> Result<(), Error> {
        let ours = std::path::absolute(self.dir.join("sandbox-ca.crt"));
        let ours = ours.unwrap_or_else(|_| self.dir.join("sandbox-ca.crt"));
        files::make_dir(dir)?;
        for name in LINKS {
            files::link(&ours, &dir.join(name))?;
        }
        Ok(())
    }

    /// The CA's certificate, PEM.
    pub(crate) fn ca_pem(&self) -> &str {
        self.authority.cert_pem()
    }

    /// The server's certificate for the next handshake, PEM.
    pub(crate) fn shown_pem(&self) -> String {
        self.current.pem()
    }

    /// Signs a client's certificate request: the certificate as PEM, and its serial number. An error says what is
    /// wrong with the request.
    pub(crate) fn sign(
        &self,
        csr_pem: &str,
        client: &ForClient<'_>,
    ) -> Result<(String, String), String> {
        self.authority.sign(csr_pem, client)
    }

    /// rustls' configuration: clients have a certificate of our CA, or none; never another's.
    pub(crate) fn server_config(&self) -> Result<ServerConfig, Error> {
        let failed = |cause: &dyn std::fmt::Display| Error::Certificate {
            operation: "use the certificates",
            dir: self.dir.clone(),
            cause: cause.to_string(),
        };
        let provider = Arc::new(default_provider());
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_slice(self.ca_pem().as_bytes());
        roots
            .add(ca.map_err(|e| failed(&e))?)
            .map_err(|e| failed(&e))?;
        let clients =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .allow_unauthenticated()
                .build()
                .map_err(|e| failed(&e))?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| failed(&e))?
            .with_client_cert_verifier(clients)
            .with_cert_resolver(Arc::clone(&self.current) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = vec![b"h2".to_vec()];
        // No session resumption: every connection authenticates anew.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }
}

// === impl Current ===

impl Current {
    fn pem(&self) -> String {
        self.shown().pem.clone()
    }

    fn shown(&self) -> std::sync::RwLockReadGuard<'_, Shown> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.shown().key))
    }
}

// === impl Shown ===

impl Shown {
    fn load(issued: issue::Issued, dir: &Path) -> Result<Self, Error> {
        let failed = |cause: &dyn std::fmt::Display| Error::Certificate {
            operation: "read the server's certificate",
            dir: dir.to_owned(),
            cause: cause.to_string(),
        };
        let cert = CertificateDer::from_pem_slice(issued.cert_pem.as_bytes());
        let key = PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes());
        let (cert, key) = (cert.map_err(|e| failed(&e))?, key.map_err(|e| failed(&e))?);
        let key = CertifiedKey::from_der(vec![cert], key, &default_provider());
        Ok(Self {
            pem: issued.cert_pem,
            key: Arc::new(key.map_err(|e| failed(&e))?),
        })
    }
}

/// The principal of a client certificate. None when it has no usable common name. The handshake has verified that our
/// CA signed it.
pub(crate) fn certificate(der: &[u8]) -> Option<Certificate> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let mut names = certificate.subject().iter_common_name();
    let name = names.next()?.as_str().ok()?;
    if names.next().is_some() || name.is_empty() {
        return None;
    }
    let mut units = certificate.subject().iter_organizational_unit();
    let key = match units.next() {
        // One that names a key must name it well, or it would not be revoked with the key.
        Some(unit) => Some(unit.as_str().ok()?.parse().ok()?),
        None => None,
    };
    Some(Certificate {
        serial: format!("{:x}", certificate.tbs_certificate.serial),
        common_name: name.to_owned(),
        ends_at: certificate.validity().not_after.timestamp() * 1000,
        key,
    })
}

fn server_certificate(
    dir: &Path,
    authority: &Authority,
    ca_is_new: bool,
    names: &[Name],
) -> Result<issue::Issued, Error> {
    let cert = dir.join("sandbox-server.crt");
    let key = dir.join("sandbox-server.key");
    keep_or_issue(&cert, &key, ca_is_new, names, || {
        authority.server(names, dir)
    })
}

fn admin_certificate(dir: &Path, authority: &Authority, ca_is_new: bool) -> Result<(), Error> {
    let dir = dir.join("admin");
    let (cert, key) = (dir.join("client.crt"), dir.join("client.key"));
    keep_or_issue(&cert, &key, ca_is_new, &[], || {
        authority.client(ADMIN, &dir)
    })?;
    let ca = dir.join("ca.crt");
    if files::read(&ca)?.as_deref() == Some(authority.cert_pem()) {
        return Ok(());
    }
    files::write(&ca, authority.cert_pem())
}

fn keep_or_issue(
    cert_path: &Path,
    key_path: &Path,
    ca_is_new: bool,
    names: &[Name],
    issue: impl FnOnce() -> Result<issue::Issued, Error>,
) -> Result<issue::Issued, Error> {
    if let (false, Some(cert_pem), Some(key_pem)) =
        (ca_is_new, files::read(cert_path)?, files::read(key_path)?)
        && is_good(&cert_pem, names, unix_now_s())
    {
        return Ok(issue::Issued { cert_pem, key_pem });
    }
    let issued = issue()?;
    files::write_key(key_path, &issued.key_pem)?;
    files::write(cert_path, &issued.cert_pem)?;
    Ok(issued)
}

/// Whether a certificate is not near expiry and has every name. One that cannot be read is not good.
fn is_good(cert_pem: &str, names: &[Name], now_s: i64) -> bool {
    let Ok((_, pem)) = x509_parser::pem::parse_x509_pem(cert_pem.as_bytes()) else {
        return false;
    };
    let Ok(certificate) = pem.parse_x509() else {
        return false;
    };
    certificate.validity().not_after.timestamp() - now_s >= RENEW_BEFORE_S
        && names.iter().all(|name| name.is_in(&certificate))
}

fn unix_now_s() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    i64::try_from(since.unwrap_or_default().as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn names(list: &[&str]) -> Vec<Name> {
        list.iter().map(|name| Name::new(name).unwrap()).collect()
    }

    fn open(dir: &tempfile::TempDir, list: &[&str]) -> Tls {
        Tls::open(dir.path(), &names(list)).unwrap()
    }

    #[test]
    fn certificates_are_kept_until_a_name_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let first = open(&dir, &["localhost", "127.0.0.1", "::1"]);
        let again = open(&dir, &["localhost", "127.0.0.1"]);
        assert_eq!(first.current.pem(), again.current.pem());
        let more = open(&dir, &["localhost", "10.9.8.7"]);
        assert_ne!(first.current.pem(), more.current.pem());
        assert_eq!(first.ca_pem(), more.ca_pem());
    }

    #[test]
    fn a_running_server_gets_a_new_certificate_for_a_new_name() {
        let dir = tempfile::tempdir().unwrap();
        let tls = open(&dir, &["localhost"]);
        let before = tls.current.pem();
        assert!(!tls.refresh(&names(&["localhost"])).unwrap());
        assert!(tls.refresh(&names(&["localhost", "10.9.8.7"])).unwrap());
        let after = tls.current.pem();
        assert_ne!(before, after);
        assert!(is_good(&after, &names(&["10.9.8.7"]), unix_now_s()));
        // By hand, too.
        std::fs::remove_file(dir.path().join("sandbox-server.crt")).unwrap();
        assert!(tls.refresh(&names(&["localhost"])).unwrap());
        assert_ne!(tls.current.pem(), after);
    }

    #[test]
    fn a_client_is_signed_for_its_key_and_nothing_it_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let tls = open(&dir, &["localhost"]);
        let key = rcgen::KeyPair::generate().unwrap();
        let mut asked = rcgen::CertificateParams::new(vec!["evil.example".to_owned()]).unwrap();
        asked.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        asked
            .distinguished_name
            .push(rcgen::DnType::CommonName, "root");
        let csr = asked.serialize_request(&key).unwrap().pem().unwrap();
        let id = k8e_model::KeyId::random();
        let client = ForClient {
            name: "ann",
            key: &id,
            lifetime: CERT_LIFETIME * 9,
        };
        let (pem, serial) = tls.sign(&csr, &client).unwrap();
        let (_, der) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap();
        let is = certificate(&der.contents).unwrap();
        assert_eq!((is.common_name.as_str(), is.key), ("ann", Some(id.clone())));
        assert_eq!(is.serial, serial);
        let days = (is.ends_at / 1000 - unix_now_s()) / 86400;
        assert!((89..=90).contains(&days), "{days}");
        let parsed = der.parse_x509().unwrap();
        assert!(!parsed.is_ca() && parsed.subject_alternative_name().unwrap().is_none());

        let other = rcgen::KeyPair::generate().unwrap().serialize_pem();
        for bad in ["", "garbage", &other, &csr.replace("MI", "MJ")] {
            assert!(tls.sign(bad, &client).is_err(), "{bad}");
        }
        let (_, again) = tls.sign(&csr, &client).unwrap();
        assert_ne!(
            again, serial,
            "two devices with one key are two certificates"
        );
    }

    #[test]
    fn certificates_near_their_end_are_not_good() {
        let dir = tempfile::tempdir().unwrap();
        let pem = open(&dir, &["localhost"]).current.pem();
        let names = names(&["localhost"]);
        let day = 24 * 3600;
        assert!(is_good(&pem, &names, unix_now_s() + 59 * day));
        assert!(!is_good(&pem, &names, unix_now_s() + 61 * day));
        assert!(!is_good("not a certificate", &names, 0));
    }

    #[test]
    fn a_lost_authority_is_replaced_with_all_it_signed() {
        let dir = tempfile::tempdir().unwrap();
        let first = open(&dir, &["localhost"]);
        std::fs::remove_file(dir.path().join("sandbox-ca.crt")).unwrap();
        let second = open(&dir, &["localhost"]);
        assert_ne!(first.ca_pem(), second.ca_pem());
        assert_ne!(first.current.pem(), second.current.pem());
    }

    #[test]
    fn a_broken_authority_is_an_error_that_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        open(&dir, &[]);
        std::fs::write(dir.path().join("sandbox-ca.key"), "garbage").unwrap();
        let error = Tls::open(dir.path(), &[]).err().unwrap().to_string();
        assert!(error.contains("new authority"), "{error}");
    }

    #[test]
    fn links_to_the_authority_leave_other_files_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, links) = (dir.path().join("tls"), dir.path().join("server/tls"));
        std::fs::create_dir_all(&links).unwrap();
        std::fs::write(links.join("sandbox-ca.crt"), "another server's").unwrap();
        std::os::unix::fs::symlink("/nowhere", links.join("serving-kube-apiserver.crt")).unwrap();
        let tls = Tls::open(&ours, &[]).unwrap();
        tls.link_authority(&links).unwrap();
        tls.link_authority(&links).unwrap();
        let read = |name: &str| std::fs::read_to_string(links.join(name)).unwrap();
        assert_eq!(read("sandbox-ca.crt"), "another server's");
        assert_eq!(read("serving-kube-apiserver.crt"), tls.ca_pem());
    }

    #[test]
    fn keys_are_for_root_alone() {
        let dir = tempfile::tempdir().unwrap();
        open(&dir, &[]);
        for key in ["sandbox-ca.key", "sandbox-server.key", "admin/client.key"] {
            let mode = std::fs::metadata(dir.path().join(key))
                .unwrap()
                .permissions()
                .mode();
            assert_eq!(mode & 0o777, 0o600, "{key}");
        }
    }

    #[test]
    fn the_admin_has_a_name() {
        let dir = tempfile::tempdir().unwrap();
        open(&dir, &[]);
        let pem = std::fs::read(dir.path().join("admin/client.crt")).unwrap();
        let (_, pem) = x509_parser::pem::parse_x509_pem(&pem).unwrap();
        let admin = certificate(&pem.contents).unwrap();
        assert_eq!((admin.common_name.as_str(), admin.key), (ADMIN, None));
        assert_eq!(certificate(b"garbage"), None);
    }
}
