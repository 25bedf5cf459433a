//! Arbitrary certificate requests, and what must hold for the certificates they get. For the crate `fuzz`.

use super::issue::{Authority, CERT_LIFETIME, ForClient};
use k8e_model::KeyId;
use std::path::Path;
use std::sync::OnceLock;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// Signs the request if it is one. Returns `signed`, or the error.
pub fn certificate_request(pem: &str) -> String {
    static AUTHORITY: OnceLock<(Authority, KeyId)> = OnceLock::new();
    let (authority, key) = AUTHORITY.get_or_init(|| {
        let made = Authority::generate(Path::new("/")).expect("an authority can be made");
        (made, KeyId::random())
    });
    let client = ForClient {
        name: "ann",
        key,
        lifetime: CERT_LIFETIME,
    };
    let (made, serial) = match authority.sign(pem, &client) {
        Ok(made) => made,
        Err(wrong) => return wrong,
    };
    let (_, der) = x509_parser::pem::parse_x509_pem(made.as_bytes()).expect("we made it");
    let (_, certificate) = X509Certificate::from_der(&der.contents).expect("we made it");
    let names: Vec<_> = certificate.subject().iter_common_name().collect();
    assert_eq!(names.len(), 1, "the name is ours to give");
    assert_eq!(names[0].as_str().ok(), Some("ann"));
    assert!(!certificate.is_ca(), "it signs nothing");
    let alternatives = certificate
        .subject_alternative_name()
        .expect("ours are right");
    assert!(alternatives.is_none(), "nor is it anything else's");
    assert_eq!(certificate.raw_serial_as_string().replace(':', ""), serial);
    "signed".to_owned()
}
