//! nftables rules of a sandbox's network namespace: TPROXY for every connection and datagram.
//!
//! ```text
//! table ip k8e {
//!   chain gate {
//!     type filter hook prerouting priority mangle; policy drop;
//!     iifname "eth0" drop                                  # read by the sentry from a raw socket
//!     iifname "lo" ip daddr 127.0.0.0/8 accept
//!     ip daddr 198.18.0.2 accept                           # to the sandbox
//!     ip daddr 198.18.0.1 udp dport 53 accept
//!     ip daddr 198.18.0.1 tcp dport 53 accept
//!     meta l4proto tcp tproxy to 198.18.0.1:1 accept       # whatever its destination
//!     meta l4proto udp tproxy to 198.18.0.1:1 accept
//!     meta l4proto tcp reject with tcp reset               # no gate listens: no server runs
//!   }
//! }
//! ```

use super::{ADDRESS, DNS_PORT, GATE_PORT, GATEWAY, VETH_SANDBOX};
use crate::netlink::{ACK, APPEND, Attributes, CREATE, Messages, Netlink};
use rustix::net::netlink;
use std::io;
use std::sync::LazyLock;

const TABLE: &str = "k8e";
const CHAIN: &str = "gate";

/// The netlink messages of the ruleset, which is the same for every sandbox.
static RULES: LazyLock<Messages> = LazyLock::new(ruleset);

/// Loads the ruleset into this network namespace, as one transaction.
pub(super) fn load() -> io::Result<()> {
    Netlink::open(Some(netlink::NETFILTER))?.execute(&RULES)
}

/// `NFNL_SUBSYS_NFTABLES`.
const SUBSYSTEM: u16 = 10;
/// `struct nfgenmsg` of the messages that begin and end a batch: the subsystem it is for.
const BATCH: [u8; 4] = [0, 0, 0, 10];
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NEW_TABLE: u16 = SUBSYSTEM << 8;
const NEW_CHAIN: u16 = (SUBSYSTEM << 8) | 3;
const NEW_RULE: u16 = (SUBSYSTEM << 8) | 6;

const IPV4: u8 = 2;
const HOOK_PREROUTING: u32 = 0;
const PRIORITY_MANGLE: i32 = -150;

const DROP: u32 = 0;
const ACCEPT: u32 = 1;

/// Registers of the nftables virtual machine: the verdict, and two for values.
const VERDICT: u32 = 0;
const FIRST: u32 = 1;
const SECOND: u32 = 2;

const META_INTERFACE_NAME: u32 = 6;
const META_PROTOCOL: u32 = 16;

/// Base of a payload offset.
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;

const REJECT_WITH_RESET: u32 = 1;

const TCP: u8 = 6;
const UDP: u8 = 17;

fn ruleset() -> Messages {
    let mut messages = Messages::default();
    messages.add(BATCH_BEGIN, 0, &BATCH, |_| {});
    let fixed = [IPV4, 0, 0, 0];
    messages.add(NEW_TABLE, CREATE | ACK, &fixed, |table| {
        table.text(1, TABLE);
    });
    messages.add(NEW_CHAIN, CREATE | ACK, &fixed, |chain| {
        chain.text(1, TABLE).text(3, CHAIN);
        chain.nest(4, |hook| {
            hook.number(1, HOOK_PREROUTING);
            hook.put(2, &PRIORITY_MANGLE.to_be_bytes());
        });
        chain.number(5, DROP).text(7, "filter");
    });
    let mut rule = |expressions: &dyn Fn(&mut Rule<'_, '_>)| {
        messages.add(NEW_RULE, CREATE | APPEND | ACK, &fixed, |rule| {
            rule.text(1, TABLE).text(2, CHAIN);
            rule.nest(4, |list| expressions(&mut Rule(list)));
        });
    };
    rule(&|r| r.from(VETH_SANDBOX).verdict(DROP));
    rule(&|r| r.from("lo").meant_for_net(127).verdict(ACCEPT));
    rule(&|r| r.meant_for(ADDRESS.octets()).verdict(ACCEPT));
    for protocol in [UDP, TCP] {
        rule(&|r| {
            r.meant_for(GATEWAY.octets())
                .protocol(protocol)
                .port(DNS_PORT)
                .verdict(ACCEPT);
        });
    }
    for protocol in [TCP, UDP] {
        rule(&|r| r.protocol(protocol).redirect().verdict(ACCEPT));
    }
    rule(&|r| r.protocol(TCP).reset());
    messages.add(BATCH_END, 0, &BATCH, |_| {});
    messages
}

/// A rule's expressions, in the order in which they run.
struct Rule<'a, 'b>(&'a mut Attributes<'b>);

// === impl Rule ===

impl Rule<'_, '_> {
    fn from(&mut self, veth: &str) -> &mut Self {
        // Interface names are compared with their zero padding.
        let mut name = [0; libc::IFNAMSIZ];
        name[..veth.len()].copy_from_slice(veth.as_bytes());
        self.meta(META_INTERFACE_NAME).is(&name)
    }

    fn protocol(&mut self, protocol: u8) -> &mut Self {
        self.meta(META_PROTOCOL).is(&[protocol])
    }

    fn meant_for(&mut self, address: [u8; 4]) -> &mut Self {
        self.payload(NETWORK_HEADER, 16, 4).is(&address)
    }

    fn meant_for_net(&mut self, byte: u8) -> &mut Self {
        self.payload(NETWORK_HEADER, 16, 1).is(&[byte])
    }

    fn port(&mut self, port: u16) -> &mut Self {
        self.payload(TRANSPORT_HEADER, 2, 2).is(&port.to_be_bytes())
    }

    fn redirect(&mut self) -> &mut Self {
        self.load(FIRST, &GATEWAY.octets());
        self.load(SECOND, &GATE_PORT.to_be_bytes());
        self.expression("tproxy", |tproxy| {
            tproxy.number(1, IPV4.into());
            tproxy.number(2, FIRST).number(3, SECOND);
        })
    }

    fn verdict(&mut self, code: u32) {
        self.expression("immediate", |immediate| {
            immediate.number(1, VERDICT);
            immediate.nest(2, |data| {
                data.nest(2, |verdict| {
                    verdict.number(1, code);
                });
            });
        });
    }

    fn reset(&mut self) {
        self.expression("reject", |reject| {
            reject.number(1, REJECT_WITH_RESET).put(2, &[0]);
        });
    }

    fn load(&mut self, register: u32, value: &[u8]) {
        self.expression("immediate", |immediate| {
            immediate.number(1, register);
            immediate.nest(2, |data| {
                data.put(1, value);
            });
        });
    }

    fn meta(&mut self, key: u32) -> &mut Self {
        self.expression("meta", |meta| {
            meta.number(1, FIRST).number(2, key);
        })
    }

    fn payload(&mut self, base: u32, offset: u32, length: u32) -> &mut Self {
        self.expression("payload", |payload| {
            payload.number(1, FIRST).number(2, base);
            payload.number(3, offset).number(4, length);
        })
    }

    fn is(&mut self, value: &[u8]) -> &mut Self {
        self.expression("cmp", |cmp| {
            cmp.number(1, FIRST).number(2, 0);
            cmp.nest(3, |data| {
                data.put(1, value);
            });
        })
    }

    fn expression(&mut self, name: &str, data: impl FnOnce(&mut Attributes<'_>)) -> &mut Self {
        self.0.nest(1, |element| {
            element.text(1, name).nest(2, data);
        });
        self
    }
}
