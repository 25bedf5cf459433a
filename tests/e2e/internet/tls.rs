//! Certificates for whichever name somebody asks for, all by one authority of the test's own.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::ServerConfig;
use rustls::crypto::ring::sign::any_ecdsa_type;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use tokio_rustls::TlsAcceptor;

/// What those are shown who name nobody.
const NOBODY: &str = "nobody.example";

/// Who signs, and what was signed.
pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    made: Mutex<HashMap<String, Arc<CertifiedKey>>>,
}

// === impl Authority ===

impl Authority {
    pub(super) fn new() -> Arc<Self> {
        let mut params = CertificateParams::default();
        let name = &mut params.distinguished_name;
        name.push(DnType::CommonName, "Authority of the miniature internet");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Arc::new(Self {
            issuer: Issuer::new(params, key),
            pem,
            made: Mutex::default(),
        })
    }

    /// What a client has to trust.
    pub(super) fn pem(&self) -> &str {
        &self.pem
    }

    /// HTTP/1.1 only, so that every request is one line of a log.
    pub(super) fn acceptor(self: &Arc<Self>) -> TlsAcceptor {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has them")
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(self) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        // A client that resumes names nobody new: each connection shall tell its whole story.
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        TlsAcceptor::from(Arc::new(config))
    }

    fn certificate(&self, name: &str) -> Arc<CertifiedKey> {
        let mut made = self.made.lock().unwrap();
        let made = made.entry(name.to_owned());
        Arc::clone(made.or_insert_with(|| self.issue(name)))
    }

    fn issue(&self, name: &str) -> Arc<CertifiedKey> {
        let mut params = CertificateParams::new([name.to_owned()]).expect("a name");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().expect("a key");
        let signed = params.signed_by(&key, &self.issuer).expect("a certificate");
        let key = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        let key = any_ecdsa_type(&key).expect("a key that can sign");
        Arc::new(CertifiedKey::new(vec![signed.der().clone()], key))
    }
}

impl ResolvesServerCert for Authority {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.certificate(hello.server_name().unwrap_or(NOBODY)))
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}
