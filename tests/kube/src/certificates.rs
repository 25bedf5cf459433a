//! The keys of one cluster. Two authorities: one for Kubernetes, one for etcd, so that no
//! certificate that the cluster gives to somebody opens its database.

use crate::{Error, error};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, DnValue,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// The certificates' directory in a cluster's.
#[derive(Debug, Clone)]
pub(crate) struct Certificates {
    dir: PathBuf,
}

/// Who a certificate is for.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Subject<'a> {
    /// The user, in Kubernetes' reading.
    pub(crate) name: &'a str,
    /// One is what a certificate has room for here.
    pub(crate) group: Option<&'a str>,
    /// Host names and addresses, if it serves.
    pub(crate) hosts: &'a [String],
}

/// The authority for everything but etcd.
pub(crate) const CLUSTER: &str = "ca";

/// The authority for etcd.
pub(crate) const ETCD: &str = "etcd-ca";

// === impl Certificates ===

impl Certificates {
    /// Makes both authorities and the key that signs service accounts' tokens.
    pub(crate) fn make(dir: PathBuf) -> Result<Self, Error> {
        std::fs::create_dir_all(&dir).map_err(error::file("make", &dir))?;
        let made = Self { dir };
        for authority in [CLUSTER, ETCD] {
            let failed = failed(authority);
            let key = KeyPair::generate().map_err(&failed)?;
            let params = authority_params(authority).map_err(&failed)?;
            let issuer = CertifiedIssuer::self_signed(params, key).map_err(&failed)?;
            made.write(&made.cert(authority), &issuer.pem())?;
            made.write(&made.key(authority), &issuer.key().serialize_pem())?;
        }
        let tokens = KeyPair::generate().map_err(failed("tokens"))?;
        made.write(&made.key("tokens"), &tokens.serialize_pem())?;
        made.write(&made.tokens_public(), &tokens.public_key_pem())?;
        Ok(made)
    }

    /// Makes `file.crt` and `file.key` for `subject`.
    pub(crate) fn issue(
        &self,
        authority: &str,
        file: &str,
        subject: Subject<'_>,
    ) -> Result<(), Error> {
        let failed = failed(file);
        let issuer = self.issuer(authority)?;
        let key = KeyPair::generate().map_err(&failed)?;
        let certificate = params(subject)
            .and_then(|params| params.signed_by(&key, &issuer))
            .map_err(&failed)?;
        self.write(&self.cert(file), &certificate.pem())?;
        self.write(&self.key(file), &key.serialize_pem())
    }

    /// The path of a certificate.
    pub(crate) fn cert(&self, file: &str) -> PathBuf {
        self.dir.join(format!("{file}.crt"))
    }

    /// The path of a private key.
    pub(crate) fn key(&self, file: &str) -> PathBuf {
        self.dir.join(format!("{file}.key"))
    }

    /// The path of the key that tokens are checked with: Kubernetes does not find it in a private
    /// key of this kind.
    pub(crate) fn tokens_public(&self) -> PathBuf {
        self.dir.join("tokens.pub")
    }

    fn issuer(&self, authority: &str) -> Result<Issuer<'static, KeyPair>, Error> {
        let failed = failed(authority);
        let read = |path: PathBuf| {
            std::fs::read_to_string(&path).map_err(error::file("read", path.clone()))
        };
        let key = KeyPair::from_pem(&read(self.key(authority))?).map_err(&failed)?;
        Issuer::from_ca_cert_pem(&read(self.cert(authority))?, key).map_err(&failed)
    }

    fn write(&self, path: &Path, pem: &str) -> Result<(), Error> {
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        options
            .open(path)
            .and_then(|mut file| file.write_all(pem.as_bytes()))
            .map_err(error::file("write", path))
    }
}

fn authority_params(name: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = params(Subject {
        name,
        ..Subject::default()
    })?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::DigitalSignature,
    ];
    params.extended_key_usages.clear();
    Ok(params)
}

fn params(subject: Subject<'_>) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(subject.hosts.to_vec())?;
    let mut name = DistinguishedName::new();
    name.push(
        DnType::CommonName,
        DnValue::Utf8String(subject.name.to_owned()),
    );
    if let Some(group) = subject.group {
        name.push(
            DnType::OrganizationName,
            DnValue::Utf8String(group.to_owned()),
        );
    }
    params.distinguished_name = name;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ClientAuth,
        ExtendedKeyUsagePurpose::ServerAuth,
    ];
    Ok(params)
}

fn failed(name: &str) -> impl Fn(rcgen::Error) -> Error {
    move |source| Error::Certificate {
        name: name.to_owned(),
        source,
    }
}
