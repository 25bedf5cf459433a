//! Issues certificates: ECDSA P-256, which `sandbox.v1` clients expect.

use super::names::Name;
use crate::Error;
use k8e_model::KeyId;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SerialNumber, SubjectPublicKeyInfo,
};
use std::path::Path;
use std::time::Duration;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer as _;

const DAY: Duration = Duration::from_secs(24 * 3600);
const CA_DAYS: u32 = 3650;
const CERT_DAYS: u32 = 90;

/// Random bytes of a serial number: RFC 5280 allows 20, and the first bit must not be set.
const SERIAL_BYTES: usize = 16;

/// How long a certificate lives.
pub(crate) const CERT_LIFETIME: Duration = Duration::from_secs(24 * 3600 * CERT_DAYS as u64);

/// Clock skew: a new certificate is valid on a machine whose clock is an hour behind.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// The certificate authority: its certificate and key.
pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    cert_pem: String,
}

/// What goes into a client's certificate.
pub(crate) struct ForClient<'a> {
    pub(crate) name: &'a str,
    /// The API key that it is issued for.
    pub(crate) key: &'a KeyId,
    /// No longer than [`CERT_LIFETIME`].
    pub(crate) lifetime: Duration,
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
        let mut params = params("K8E Sandbox CA", DAY * CA_DAYS);
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

    /// A certificate for a server with these names.
    pub(super) fn server(&self, names: &[Name], dir: &Path) -> Result<Issued, Error> {
        let mut params = params("k8e server", CERT_LIFETIME);
        params.subject_alt_names = names.iter().map(Name::san).collect();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.issue(params)
            .map_err(failed("make the server's certificate", dir))
    }

    /// A certificate for a client of this name.
    pub(super) fn client(&self, name: &str, dir: &Path) -> Result<Issued, Error> {
        let mut params = params(name, CERT_LIFETIME);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.issue(params)
            .map_err(failed("make a client certificate", dir))
    }

    /// A certificate for the public key of this request (PEM, PKCS#10). Its signature is verified; the names in it are
    /// ignored. Returns the certificate as PEM, and its serial number.
    pub(super) fn sign(
        &self,
        csr_pem: &str,
        client: &ForClient<'_>,
    ) -> Result<(String, String), String> {
        let wrong = |what: &dyn std::fmt::Display| {
            format!("the certificate request cannot be used: {what}")
        };
        let (_, pem) =
            x509_parser::pem::parse_x509_pem(csr_pem.as_bytes()).map_err(|e| wrong(&e))?;
        let (_, request) =
            X509CertificationRequest::from_der(&pem.contents).map_err(|e| wrong(&e))?;
        request.verify_signature().map_err(|e| wrong(&e))?;
        let public = request.certification_request_info.subject_pki.raw;
        let public = SubjectPublicKeyInfo::from_der(public).map_err(|e| wrong(&e))?;
        let mut params = params(client.name, client.lifetime.min(CERT_LIFETIME));
        params
            .distinguished_name
            .push(DnType::OrganizationalUnitName, client.key.as_str());
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        common(&mut params);
        let serial = params.serial_number.as_ref().map(hex).unwrap_or_default();
        let certificate = params
            .signed_by(&public, &self.issuer)
            .map_err(|e| wrong(&e))?;
        Ok((certificate.pem(), serial))
    }

    fn issue(&self, mut params: CertificateParams) -> Result<Issued, rcgen::Error> {
        common(&mut params);
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?;
        Ok(Issued {
            cert_pem: cert.pem(),
            key_pem: key.serialize_pem(),
        })
    }
}

/// What every certificate has that is not the authority's.
fn common(params: &mut CertificateParams) {
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.use_authority_key_identifier_extension = true;
    let mut serial = [0; SERIAL_BYTES];
    getrandom::fill(&mut serial).expect("the kernel always has random bytes after boot");
    // Positive, and of the same length always.
    serial[0] = serial[0] & 0x7f | 0x40;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
}

fn hex(serial: &SerialNumber) -> String {
    let bytes = serial.to_bytes();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn params(common_name: &str, lifetime: Duration) -> CertificateParams {
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
    params.not_after = now + lifetime;
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
