//! Egress flags of `k8e server` (allow and deny lists, DNS upstreams, bandwidth), and the configuration made from them.

use super::error::Error;
use clap::Args;
use k8e_cli::units;
use k8e_engine::Denied;
use k8e_model::{DenyList, EgressPolicy, TenantId};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

/// Port of a --dns-upstream without one.
const DNS_PORT: u16 = 53;

/// Has the DNS resolvers of this machine.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Egress connections of all sandboxes together get this fraction (1/n) of the process' descriptor limit. The rest is
/// for API clients and for the sockets that each sandbox needs.
const DESCRIPTORS_PART: usize = 2;

/// Default of --egress-bandwidth: faster than most machines' network, and a bound for the relay work of one sandbox.
const BANDWIDTH_DEFAULT: &str = "1GiB";

/// Smallest --egress-bandwidth: below it every connection times out, so a smaller value is a typo.
const BANDWIDTH_MIN: u64 = 1024;

/// Egress flags.
#[derive(Args, Debug)]
#[command(next_help_heading = "Network")]
pub(super) struct EgressArgs {
    /// Default egress allow-list (when the request sets none): host names, *.host, host:port, networks, presets as @python;
    /// or none, or all (default: @default; with --hardened, none)
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    allowed_hosts: Vec<String>,

    /// Egress deny-list, which wins over every allow-list; TENANT=HOST denies it to one tenant only
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    denied_hosts: Vec<String>,

    /// DNS resolver for names that sandboxes look up, as IP or IP:PORT; may be repeated [default: those of /etc/resolv.conf]
    #[arg(long, value_name = "ADDRESS", value_parser = upstream)]
    dns_upstream: Vec<SocketAddr>,

    /// Limit for open egress connections of one session
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    egress_connections_max: u16,

    /// Egress bandwidth of one session in bytes per second, sent and received together, as 10MiB; none for no limit
    #[arg(long, default_value = BANDWIDTH_DEFAULT, value_name = "SIZE", value_parser = bandwidth)]
    egress_bandwidth: Bandwidth,
}

/// Bytes per second; `None` is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bandwidth(Option<u64>);

/// Egress configuration of the server.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Egress {
    /// Default allow-list (when the request sets none).
    pub(super) allowed: EgressPolicy,
    /// Deny-lists of the server and of its tenants.
    pub(super) denied: Denied,
    /// DNS resolvers; empty for those of this machine.
    pub(super) upstreams: Vec<SocketAddr>,
    /// Open connections of one session.
    pub(super) connections_max: usize,
    /// Bandwidth of one session, both directions together; `None` is no limit.
    pub(super) bytes_per_second: Option<u64>,
}

// === impl EgressArgs ===

impl EgressArgs {
    pub(super) fn config(self, hardened: bool) -> Result<Egress, Error> {
        let allowed = match (self.allowed_hosts.as_slice(), hardened) {
            ([], true) => Ok(EgressPolicy::None),
            ([], false) => EgressPolicy::parse(&["@default"]),
            (hosts, _) => EgressPolicy::parse(hosts),
        };
        let allowed = allowed.map_err(Error::AllowedHosts)?;
        let mut everybody = Vec::new();
        let mut tenants: BTreeMap<TenantId, Vec<&str>> = BTreeMap::new();
        for entry in &self.denied_hosts {
            match entry.split_once('=') {
                Some((tenant, host)) => {
                    let tenant = tenant.trim().parse().map_err(Error::DeniedHosts)?;
                    tenants.entry(tenant).or_default().push(host);
                }
                None => everybody.push(entry.as_str()),
            }
        }
        let list = |hosts: &[&str]| DenyList::parse(hosts).map_err(Error::DeniedHosts);
        let tenants = tenants
            .into_iter()
            .map(|(tenant, hosts)| Ok((tenant, list(&hosts)?)));
        Ok(Egress {
            allowed,
            denied: Denied {
                everybody: list(&everybody)?,
                tenants: tenants.collect::<Result<_, Error>>()?,
            },
            upstreams: self.dns_upstream,
            connections_max: self.egress_connections_max.into(),
            bytes_per_second: self.egress_bandwidth.0,
        })
    }
}

// === impl Egress ===

impl Egress {
    /// Reads the DNS resolvers of this machine when none are configured, and warns when there are none. Called as root:
    /// the file may be a link to anywhere.
    pub(super) fn find_upstreams(&mut self) {
        if self.upstreams.is_empty() {
            self.upstreams = resolv_conf(&std::fs::read_to_string(RESOLV_CONF).unwrap_or_default());
        }
        if self.upstreams.is_empty() {
            tracing::warn!(
                "{RESOLV_CONF} has no nameserver: sandboxes cannot resolve any name; set --dns-upstream"
            );
        }
    }

    /// Starts the egress service, which makes a gate for each sandbox.
    pub(super) fn start(self) -> k8e_egress::Egress {
        k8e_egress::Egress::start(k8e_egress::Config {
            upstreams: self.upstreams,
            connections_max: self.connections_max,
            bandwidth: self.bytes_per_second,
            descriptors_max: crate::descriptors::limit() / DESCRIPTORS_PART,
        })
    }
}

/// The nameservers of a `resolv.conf`. Addresses with a zone (`fe80::1%eth0`) are left out.
fn resolv_conf(text: &str) -> Vec<SocketAddr> {
    let address = |line: &str| {
        let mut words = line.split_whitespace();
        let named = words.next() == Some("nameserver");
        let ip: IpAddr = words.next().filter(|_| named)?.parse().ok()?;
        Some(SocketAddr::from((ip, DNS_PORT)))
    };
    text.lines().filter_map(address).collect()
}

fn upstream(text: &str) -> Result<SocketAddr, String> {
    let bare = text.parse::<IpAddr>().map(|ip| (ip, DNS_PORT).into());
    let address: SocketAddr = bare.or_else(|_| text.parse()).map_err(|_| {
        format!("{text:?} is not an address: write 192.0.2.53, 192.0.2.53:53 or [2001:db8::53]:53")
    })?;
    if address.port() == 0 || address.ip().is_unspecified() {
        return Err(format!(
            "{text:?} is not the address of a resolver: port 0 and unspecified addresses cannot answer"
        ));
    }
    Ok(address)
}

fn bandwidth(text: &str) -> Result<Bandwidth, String> {
    if text == "none" {
        return Ok(Bandwidth(None));
    }
    match units::size(text)? {
        bytes if bytes >= BANDWIDTH_MIN => Ok(Bandwidth(Some(bytes))),
        bytes => Err(format!(
            "{bytes} bytes per second are too few: write {BANDWIDTH_MIN} or more, or none for no limit"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct Line {
        #[command(flatten)]
        args: EgressArgs,
    }

    fn parsed(line: &str) -> Result<Line, clap::Error> {
        Line::try_parse_from(["server"].into_iter().chain(line.split_whitespace()))
    }

    fn config(line: &str) -> Result<Egress, Error> {
        parsed(line).unwrap().args.config(false)
    }

    #[test]
    fn nothing_said_is_the_default_list() {
        let egress = config("").unwrap();
        let want = Egress {
            allowed: EgressPolicy::parse(&["@default"]).unwrap(),
            denied: Denied::default(),
            upstreams: Vec::new(),
            connections_max: 256,
            bytes_per_second: Some(1 << 30),
        };
        assert_eq!(egress, want);
    }

    #[test]
    fn hardened_sessions_reach_nothing_unless_somebody_says_so() {
        let allowed = |line| parsed(line).unwrap().args.config(true).unwrap().allowed;
        assert_eq!(allowed(""), EgressPolicy::None);
        let said = allowed("--allowed-hosts a.example");
        assert_eq!(said.entries(), ["a.example"]);
    }

    #[test]
    fn what_is_said_is_taken() {
        let egress = config(
            "--allowed-hosts a.example,*.b.example --allowed-hosts @npm \
             --denied-hosts bad.example,team=10.0.0.0/8 --denied-hosts team=*.bad.example \
             --dns-upstream 192.0.2.53 --dns-upstream [::1]:5353 \
             --egress-connections-max 5 --egress-bandwidth 10MiB",
        )
        .unwrap();
        let allowed = egress.allowed.entries();
        assert_eq!(allowed[..2], ["a.example", "*.b.example"]);
        assert!(allowed.len() > 2);
        let other = "other".parse().unwrap();
        assert_eq!(egress.denied.to(&other).entries(), ["bad.example"]);
        let team = egress.denied.to(&"team".parse().unwrap()).entries();
        assert_eq!(team, ["bad.example", "*.bad.example", "10.0.0.0/8"]);
        let upstreams: Vec<String> = egress.upstreams.iter().map(ToString::to_string).collect();
        assert_eq!(upstreams, ["192.0.2.53:53", "[::1]:5353"]);
        assert_eq!(egress.connections_max, 5);
        assert_eq!(egress.bytes_per_second, Some(10 << 20));
        let unlimited = config("--egress-bandwidth none").unwrap();
        assert_eq!(unlimited.bytes_per_second, None);
    }

    #[test]
    fn whom_this_machine_asks_is_read() {
        let read = resolv_conf(
            "# comment\nsearch example\nnameserver 192.0.2.53\n nameserver 2001:db8::53 # \nnameserver fe80::1%eth0\nnameserver\n",
        );
        let read: Vec<String> = read.iter().map(ToString::to_string).collect();
        assert_eq!(read, ["192.0.2.53:53", "[2001:db8::53]:53"]);
        assert!(resolv_conf("nonsense").is_empty());
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            "--allowed-hosts none,a.example",
            "--allowed-hosts @nobody",
            "--denied-hosts all",
            "--denied-hosts a.example:443",
            "--denied-hosts Team=a.example",
            "--denied-hosts team=",
        ] {
            assert!(config(bad).is_err(), "{bad}");
        }
        for bad in [
            "--dns-upstream resolver.example",
            "--dns-upstream 192.0.2.53:0",
            "--dns-upstream 0.0.0.0",
            "--egress-connections-max 0",
            "--egress-bandwidth 0",
            "--egress-bandwidth fast",
        ] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }
}
