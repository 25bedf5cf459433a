//! Which registries a server may ask, and at which addresses: an operator's decision.

use super::http::Url;
use crate::error::ImageError;
use crate::reference::is_authority;
use k8e_model::Code;
use k8e_model::egress::{is_never, is_public};
use std::net::{IpAddr, Ipv4Addr};

/// What an operator decides about registries. The default asks any at a public address, by TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistryPolicy {
    insecure: Vec<String>,
    private: Vec<String>,
    mirrors: Vec<String>,
}

// === impl RegistryPolicy ===

impl RegistryPolicy {
    /// Each is `HOST[:PORT]`. Those in `insecure` are spoken to without TLS; those, and those in
    /// `private`, may be at addresses of this machine and of private networks. `mirrors` of Docker Hub
    /// are asked before it.
    ///
    /// # Errors
    ///
    /// When one is not a host.
    pub fn new(
        insecure: Vec<String>,
        private: Vec<String>,
        mirrors: Vec<String>,
    ) -> Result<Self, ImageError> {
        let all = insecure.iter().chain(&private).chain(&mirrors);
        if let Some(bad) = all.into_iter().find(|text| !is_authority(text)) {
            return Err(ImageError::invalid(format!(
                "{bad:?} is not a registry: write HOST or HOST:PORT"
            )));
        }
        Ok(Self {
            insecure,
            private,
            mirrors,
        })
    }

    pub(super) fn mirrors(&self) -> &[String] {
        &self.mirrors
    }

    /// Where the API of a registry begins.
    pub(super) fn base(&self, authority: &str) -> Result<Url, ImageError> {
        let scheme = match self.insecure.iter().any(|host| host == authority) {
            true => "http",
            false => "https",
        };
        Url::parse(&format!("{scheme}://{authority}"))
    }

    /// Whether a URL may be asked for at all: also one that a registry sent us to.
    pub(super) fn check_url(&self, url: &Url) -> Result<(), ImageError> {
        if url.is_tls() || self.lists(&self.insecure, url) {
            return Ok(());
        }
        Err(refused(format!(
            "{} is only spoken to by TLS: `k8e server --registry-insecure {}` allows plain HTTP",
            url.host(),
            url.authority()
        )))
    }

    /// Whether a connection to this address, for that URL, may be made.
    pub(super) fn check_address(&self, url: &Url, address: IpAddr) -> Result<(), ImageError> {
        let IpAddr::V4(address) = address.to_canonical() else {
            return Err(refused(format!(
                "{} is at {address}: registries are asked by IPv4 only",
                url.host()
            )));
        };
        // Addresses of clouds' metadata services and the like are nobody's registry.
        if is_never(address) && !address.is_loopback() {
            return Err(refused(format!(
                "{} is at {address}, where no registry is ever asked",
                url.host()
            )));
        }
        let listed = self.lists(&self.insecure, url) || self.lists(&self.private, url);
        match listed || is_public(address) {
            true => Ok(()),
            false => Err(refused(format!(
                "{} is at {address}, which is not a public address: `k8e server --registry-private {}` allows it",
                url.host(),
                url.authority()
            ))),
        }
    }

    fn lists(&self, list: &[String], url: &Url) -> bool {
        list.iter().any(|entry| match entry.split_once(':') {
            Some(_) => *entry == url.authority(),
            None => *entry == url.host() && url.has_default_port(),
        })
    }
}

/// Names of this machine, which no resolver need know.
pub(super) fn own_name(host: &str) -> Option<IpAddr> {
    (host == "localhost").then_some(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

fn refused(why: String) -> ImageError {
    ImageError::Registry(why, Code::Denied)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(insecure: &[&str], private: &[&str]) -> RegistryPolicy {
        let own = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
        RegistryPolicy::new(own(insecure), own(private), Vec::new()).unwrap()
    }

    #[test]
    fn addresses_are_checked_for_every_url() {
        let open = RegistryPolicy::default();
        let url = Url::parse("https://registry.example/v2/").unwrap();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(open.check_address(&url, ip("93.184.215.14")).is_ok());
        for bad in [
            "127.0.0.1",
            "10.0.0.1",
            "169.254.169.254",
            "192.168.1.1",
            "0.0.0.0",
            "::1",
            "fd00:ec2::254",
            "::ffff:127.0.0.1",
            "100.100.100.200",
        ] {
            assert!(open.check_address(&url, ip(bad)).is_err(), "{bad}");
        }
        let listed = policy(&["localhost:5000"], &["registry.example"]);
        assert!(listed.check_address(&url, ip("10.0.0.1")).is_ok());
        assert!(listed.check_address(&url, ip("127.0.0.1")).is_ok());
        for never in ["169.254.169.254", "0.0.0.0", "100.100.100.200"] {
            assert!(listed.check_address(&url, ip(never)).is_err(), "{never}");
        }
        let plain = Url::parse("http://localhost:5000/v2/").unwrap();
        assert!(listed.check_url(&plain).is_ok());
        assert!(listed.check_address(&plain, ip("127.0.0.1")).is_ok());
        let other_port = Url::parse("http://localhost:5001/v2/").unwrap();
        assert!(listed.check_url(&other_port).is_err());
        let other_port = Url::parse("https://registry.example:8443/v2/").unwrap();
        assert!(listed.check_address(&other_port, ip("10.0.0.1")).is_err());
        assert!(RegistryPolicy::new(vec!["http://x".to_owned()], vec![], vec![]).is_err());
    }
}
