//! Our own certificate authority and the certificates it signs.
//!
//! Flow: the authority is made once and kept; the server's and the admin's certificates are made
//! again at start when they are missing, of another authority, near their end, or (the server's)
//! lack a name this machine has. File names are K8E's.

mod files;
mod issue;
pub(crate) mod names;

use crate::Error;
use issue::Authority;
use names::Name;
use std::path::Path;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// A certificate with less than this left is made again.
const RENEW_BEFORE_S: i64 = 30 * 24 * 3600;

/// The name in the admin's certificate, and so the owner of what it makes.
const ADMIN: &str = "admin";

/// What the TLS door needs.
pub(crate) struct Files {
    pub(crate) ca_cert_pem: String,
    pub(crate) server_cert_pem: String,
    pub(crate) server_key_pem: String,
}

/// Makes what is missing or old in `dir`, and reads what is there.
pub(crate) fn ensure(dir: &Path, names: &[Name]) -> Result<Files, Error> {
    let admin_dir = dir.join("admin");
    files::make_dir(dir)?;
    files::make_dir(&admin_dir)?;

    let ca_path = (dir.join("sandbox-ca.crt"), dir.join("sandbox-ca.key"));
    let (authority, ca_is_new) = match (files::read(&ca_path.0)?, files::read(&ca_path.1)?) {
        (Some(cert), Some(key)) => (Authority::load(cert, &key, dir)?, false),
        _ => (Authority::generate(dir)?, true),
    };
    if ca_is_new {
        files::write_key(&ca_path.1, &authority.key_pem())?;
        files::write(&ca_path.0, authority.cert_pem())?;
    }

    let server = (
        dir.join("sandbox-server.crt"),
        dir.join("sandbox-server.key"),
    );
    let server = keep_or_issue(&server.0, &server.1, ca_is_new, names, || {
        authority.server(names, dir)
    })?;
    let admin = (admin_dir.join("client.crt"), admin_dir.join("client.key"));
    keep_or_issue(&admin.0, &admin.1, ca_is_new, &[], || {
        authority.client(ADMIN, dir)
    })?;
    files::write(&admin_dir.join("ca.crt"), authority.cert_pem())?;

    Ok(Files {
        ca_cert_pem: authority.cert_pem().to_owned(),
        server_cert_pem: server.cert_pem,
        server_key_pem: server.key_pem,
    })
}

/// The common name of a certificate. None when there is none, or several, or it is empty.
pub(crate) fn common_name(der: &[u8]) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let mut names = certificate.subject().iter_common_name();
    let name = names.next()?.as_str().ok()?;
    (names.next().is_none() && !name.is_empty()).then(|| name.to_owned())
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

/// Whether a certificate lasts and has every name. One that cannot be read is not good.
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

    #[test]
    fn certificates_are_kept_until_a_name_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let first = ensure(dir.path(), &names(&["localhost", "127.0.0.1", "::1"])).unwrap();
        let again = ensure(dir.path(), &names(&["localhost", "127.0.0.1"])).unwrap();
        assert_eq!(first.server_cert_pem, again.server_cert_pem);
        let more = ensure(dir.path(), &names(&["localhost", "10.9.8.7"])).unwrap();
        assert_ne!(first.server_cert_pem, more.server_cert_pem);
        assert_eq!(first.ca_cert_pem, more.ca_cert_pem);
    }

    #[test]
    fn certificates_near_their_end_are_not_good() {
        let dir = tempfile::tempdir().unwrap();
        let names = names(&["localhost"]);
        let files = ensure(dir.path(), &names).unwrap();
        let day = 24 * 3600;
        assert!(is_good(
            &files.server_cert_pem,
            &names,
            unix_now_s() + 59 * day
        ));
        assert!(!is_good(
            &files.server_cert_pem,
            &names,
            unix_now_s() + 61 * day
        ));
        assert!(!is_good("not a certificate", &names, 0));
    }

    #[test]
    fn a_lost_authority_is_replaced_with_all_it_signed() {
        let dir = tempfile::tempdir().unwrap();
        let first = ensure(dir.path(), &names(&["localhost"])).unwrap();
        std::fs::remove_file(dir.path().join("sandbox-ca.crt")).unwrap();
        let second = ensure(dir.path(), &names(&["localhost"])).unwrap();
        assert_ne!(first.ca_cert_pem, second.ca_cert_pem);
        assert_ne!(first.server_cert_pem, second.server_cert_pem);
    }

    #[test]
    fn a_broken_authority_is_an_error_that_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        ensure(dir.path(), &[]).unwrap();
        std::fs::write(dir.path().join("sandbox-ca.key"), "garbage").unwrap();
        let error = ensure(dir.path(), &[]).err().unwrap().to_string();
        assert!(error.contains("new authority"), "{error}");
    }

    #[test]
    fn keys_are_for_root_alone() {
        let dir = tempfile::tempdir().unwrap();
        ensure(dir.path(), &[]).unwrap();
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
        ensure(dir.path(), &[]).unwrap();
        let pem = std::fs::read(dir.path().join("admin/client.crt")).unwrap();
        let (_, pem) = x509_parser::pem::parse_x509_pem(&pem).unwrap();
        assert_eq!(common_name(&pem.contents).as_deref(), Some(ADMIN));
        assert_eq!(common_name(b"garbage"), None);
    }
}
