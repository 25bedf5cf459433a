//! Host header check against DNS rebinding.
//!
//! An attacker can make the name of a web page resolve to this address (127.0.0.1 behind a tunnel, or the address of
//! the pod). For a browser the page is then of the same origin as these HTTP APIs, and may read and write. It cannot
//! change the Host header, which has the name of the page. So only names are allowed that an attacker cannot own:
//! loopback, IP addresses, names of the cluster, and those of `-allowed-hosts`. gRPC is not checked, since no browser
//! speaks HTTP/2 without TLS; nor are requests that need a token, which a page does not have.

use hyper::HeaderMap;
use hyper::header::HOST;
use hyper::http::uri::Authority;
use std::net::IpAddr;

/// Number of names in `-allowed-hosts`. Each request is compared with all of them.
const NAMES_MAX: usize = 64;

/// Suffixes that exist in the DNS of a cluster only; nobody can register such a name.
const CLUSTER_SUFFIXES: [&str; 2] = [".svc", ".cluster.local"];

/// The names that are allowed in a Host header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AllowedHosts {
    /// Host name of this pod; agent-sandbox gives the Service of the sandbox the same name.
    own: String,
    /// `*` was given: every name is allowed.
    any: bool,
    exact: Vec<String>,
    /// Domain suffixes, each with its leading dot.
    suffixes: Vec<String>,
}

// === impl AllowedHosts ===

impl AllowedHosts {
    /// The default names for a pod with this host name.
    pub(crate) fn of_pod(own: &str) -> Self {
        Self {
            own: own.to_ascii_lowercase(),
            ..Self::default()
        }
    }

    /// Adds names, separated by commas: `name`, `*.name` for all below it, `*` for any.
    pub(crate) fn add(&mut self, list: &str) -> Result<(), &'static str> {
        for name in list.split(',').map(str::trim).filter(|n| !n.is_empty()) {
            if self.exact.len() + self.suffixes.len() == NAMES_MAX {
                return Err("at most 64 names");
            }
            let name = name.to_ascii_lowercase();
            let plain = name.strip_prefix('*').unwrap_or(&name);
            let good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
            if name == "*" {
                self.any = true;
            } else if !plain.bytes().all(good) || plain.starts_with('.') == (plain == name) {
                return Err("names without port, such as sandbox.example.com, *.example.com or *");
            } else if plain == name {
                self.exact.push(name);
            } else {
                self.suffixes.push(plain.to_owned());
            }
        }
        Ok(())
    }

    /// Whether every Host header of a request is allowed. A request without one does not come from a browser.
    pub(crate) fn serve(&self, headers: &HeaderMap) -> bool {
        self.any
            || headers.get_all(HOST).iter().all(|host| {
                let host = Authority::try_from(host.as_bytes());
                host.is_ok_and(|host| self.has(host.host()))
            })
    }

    fn has(&self, host: &str) -> bool {
        let literal = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        // An IP address is not resolved, so it cannot be rebound.
        if literal.unwrap_or(host).parse::<IpAddr>().is_ok() {
            return true;
        }
        let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        let ends = |suffix: &str| host.len() > suffix.len() && host.ends_with(suffix);
        // A name that can be registered has a dot.
        (!host.contains('.') && !host.is_empty())
            || ends(".localhost")
            || CLUSTER_SUFFIXES.iter().any(|suffix| ends(suffix))
            || self.is_own_service(&host)
            || self.exact.contains(&host)
            || self.suffixes.iter().any(|suffix| ends(suffix))
    }

    /// Whether this is `<own>.<namespace>.svc.…`. The domain of the cluster can be any, and the pod does not know it.
    fn is_own_service(&self, host: &str) -> bool {
        let mut labels = host.split('.');
        !self.own.is_empty() && labels.next() == Some(&self.own) && labels.nth(1) == Some("svc")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(list: &str) -> AllowedHosts {
        let mut allowed = AllowedHosts::of_pod("My-Sandbox");
        allowed.add(list).unwrap();
        allowed
    }

    fn serves(allowed: &AllowedHosts, hosts: &[&str]) -> bool {
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(HOST, host.parse().unwrap());
        }
        allowed.serve(&headers)
    }

    #[test]
    fn names_of_the_pod_and_the_cluster_are_allowed() {
        let default = allowed("");
        for host in [
            // Through `kubectl port-forward`, from clients and browsers.
            "127.0.0.1:41234",
            "localhost:8080",
            "LOCALHOST",
            "app.localhost:8080",
            "[::1]:8080",
            // The router, probes, and clients in the cluster.
            "10.244.0.17:8888",
            "[fd00::17]:8080",
            "my-sandbox",
            "my-sandbox.default.svc:8080",
            "my-sandbox.default.svc.cluster.local:8888",
            "other-name.default.svc.cluster.local.",
            "my-sandbox.default.svc.corp.example:8080",
        ] {
            assert!(serves(&default, &[host]), "{host}");
        }
        assert!(serves(&default, &[]));
    }

    #[test]
    fn names_that_can_be_registered_are_refused() {
        let default = allowed("");
        for host in [
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "x.default.svc.evil.example",
            "my-sandbox.evil.example",
            "svc.evil.example",
            "notlocalhost.example",
            "evilcluster.local",
            "cluster.local",
            "user@evil.example",
            "localhost@evil.example",
            "",
            ".",
            "a b",
        ] {
            assert!(!serves(&default, &[host]), "{host}");
        }
        assert!(!serves(&default, &["localhost", "evil.example"]));
        assert!(!serves(
            &AllowedHosts::of_pod(""),
            &[".ns.svc.evil.example"]
        ));
    }

    #[test]
    fn allowed_hosts_are_exact_names_or_wildcards() {
        let more = allowed("sandbox.example.com, *.preview.example.com");
        for (host, served) in [
            ("sandbox.example.com:443", true),
            ("Sandbox.Example.com", true),
            ("a.preview.example.com", true),
            ("a.b.preview.example.com", true),
            ("preview.example.com", false),
            ("xpreview.example.com", false),
            ("x.sandbox.example.com", false),
        ] {
            assert_eq!(serves(&more, &[host]), served, "{host}");
        }
        assert!(serves(&allowed("*"), &["evil.example"]));
        for bad in ["a:80", "http://a", "*a.example", ".example", "a/b", "**"] {
            assert!(AllowedHosts::of_pod("").add(bad).is_err(), "{bad}");
        }
        let many = "a.example,".repeat(NAMES_MAX + 1);
        assert!(AllowedHosts::of_pod("").add(&many).is_err());
    }
}
