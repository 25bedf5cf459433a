//! TLS certificate of the HTTPS listener, reloaded when its files change.

use super::{Error, metrics, read_file};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// Interval at which the files are read. The kubelet updates mounted Secrets within a minute or two.
const RELOAD_EVERY: Duration = Duration::from_secs(10);

/// A certificate with its key, and the files that they come from.
#[derive(Debug)]
pub(super) struct Certificate {
    cert: PathBuf,
    key: PathBuf,
    current: RwLock<Current>,
}

struct Current {
    /// Content of the two files, to detect changes.
    pem: (Vec<u8>, Vec<u8>),
    key: Arc<CertifiedKey>,
}

// === impl Certificate ===

impl Certificate {
    pub(super) fn load(cert: PathBuf, key: PathBuf) -> Result<Arc<Self>, Error> {
        let pem = read(&cert, &key)?;
        let certified = certified(&pem).map_err(|why| Error::Certificate {
            cert: cert.clone(),
            key: key.clone(),
            why,
        })?;
        let current = RwLock::new(Current {
            pem,
            key: Arc::new(certified),
        });
        Ok(Arc::new(Self { cert, key, current }))
    }

    /// TLS configuration of a listener; resolves to the current certificate in each handshake.
    pub(super) fn config(self: &Arc<Self>) -> Result<ServerConfig, Error> {
        let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::Certificate {
                cert: self.cert.clone(),
                key: self.key.clone(),
                why: error.to_string(),
            })?;
        let resolver: Arc<dyn ResolvesServerCert> = Arc::<Self>::clone(self);
        let mut config = builder.with_no_client_auth().with_cert_resolver(resolver);
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }

    /// Reloads periodically. Never returns. When the files are not valid, the previous certificate stays.
    pub(super) async fn follow(self: Arc<Self>) {
        loop {
            tokio::time::sleep(RELOAD_EVERY).await;
            self.reload();
        }
    }

    /// Loads the certificate if the files have changed.
    pub(super) fn reload(&self) {
        let result = read(&self.cert, &self.key).map_err(|error| error.to_string());
        let result = result.and_then(|pem| {
            let same = {
                let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
                current.pem == pem
            };
            if same {
                return Ok(false);
            }
            let key = Arc::new(certified(&pem)?);
            *self.current.write().unwrap_or_else(PoisonError::into_inner) = Current { pem, key };
            Ok(true)
        });
        match result {
            Ok(false) => {}
            Ok(true) => {
                metrics::cert_reload("success");
                tracing::info!("reloaded the TLS certificate from {}", self.cert.display());
            }
            Err(why) => {
                metrics::cert_reload("failure");
                tracing::warn!(
                    "cannot reload the TLS certificate from {}; the previous one stays in use: {why}",
                    self.cert.display()
                );
            }
        }
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        Some(Arc::clone(&current.key))
    }
}

impl std::fmt::Debug for Current {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Current")
    }
}

fn read(cert: &std::path::Path, key: &std::path::Path) -> Result<(Vec<u8>, Vec<u8>), Error> {
    let cert = read_file("--tls-cert-file", cert)?;
    Ok((cert, read_file("--tls-key-file", key)?))
}

fn certified((cert, key): &(Vec<u8>, Vec<u8>)) -> Result<CertifiedKey, String> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(cert).collect();
    let chain = chain.map_err(|error| format!("the certificate is not PEM: {error}"))?;
    if chain.is_empty() {
        return Err("the certificate file has no certificate".to_owned());
    }
    let key = PrivateKeyDer::from_pem_slice(key);
    let key = key.map_err(|error| format!("the key is not PEM: {error}"))?;
    CertifiedKey::from_der(chain, key, &default_provider()).map_err(|error| error.to_string())
}
