//! Making certificates: ECDSA P-256, as K8E's are.

use super::names::Name;
use crate::Error;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use std::path::Path;
use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 3600);
const CA_DAYS: u32 = 3650;
const CERT_DAYS: u32 = 90;

/// Clocks differ: what is made now is valid for a machine that is an hour behind.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// Who signs.
pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    cert_pem: String,
}

/// A certificate and its key.
pub(super) struct Issued {
    pub(super) cert_pem: String,
    pub(super) key_pem: String,
}

// === impl Authority ===

impl Authority {
    pub(super) fn generate(dir: &Path) -> Result<Self, Error> {
        let failed = failed("make the certificate authority", dir);
        let mut params = params("K8E Sandbox CA", CA_DAYS);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().map_err(&failed)?;
        let cert_pem = params.self_signed(&key).map_err(&failed)?.pem();
        Ok(Self {
            issuer: Issuer::new(params, key),
            cert_pem,
        })
    }

    pub(super) fn load(cert_pem: String, key_pem: &str, dir: &Path) -> Result<Self, Error> {
        let failed = failed("read the certificate authority", dir);
        let key = KeyPair::from_pem(key_pem).map_err(&failed)?;
        let issuer = Issuer::from_ca_cert_pem(&cert_pem, key).map_err(&failed)?;
        Ok(Self { issuer, cert_pem })
    }

    pub(super) fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    pub(super) fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// For a server with these names.
    pub(super) fn server(&self, names: &[Name], dir: &Path) -> Result<Issued, Error> {
        let mut params = params("k8e server", CERT_DAYS);
        params.subject_alt_names = names.iter().map(Name::san).collect();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.issue(params)
            .map_err(failed("make the server's certificate", dir))
    }

    /// For a client of this name.
    pub(super) fn client(&self, name: &str, dir: &Path) -> Result<Issued, Error> {
        let mut params = params(name, CERT_DAYS);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.issue(params)
            .map_err(failed("make a client certificate", dir))
    }

    fn issue(&self, mut params: CertificateParams) -> Result<Issued, rcgen::Error> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?;
        Ok(Issued {
            cert_pem: cert.pem(),
            key_pem: key.serialize_pem(),
        })
    }
}

fn params(common_name: &str, days: u32) -> CertificateParams {
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = rcgen::date_time_ymd(1970, 1, 1) + since_1970.unwrap_or_default();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    params
        .distinguished_name
        .push(DnType::OrganizationName, "K8E Sandbox");
    params.not_before = now - CLOCK_SKEW;
    params.not_after = now + DAY * days;
    params
}

fn failed(operation: &'static str, dir: &Path) -> impl Fn(rcgen::Error) -> Error {
    let dir = dir.to_owned();
    move |error| Error::Certificate {
        operation,
        dir: dir.clone(),
        cause: error.to_string(),
    }
}
