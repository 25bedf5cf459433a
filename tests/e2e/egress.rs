//! The egress suite: what a sandbox may reach, seen from where it would arrive.
//!
//! Each attempt runs in a sandbox of each runtime, on a host of a miniature internet where
//! whatever must not be reached is there and answers. Whether it was reached is for the receiving
//! side to say, which sees every packet. Then something that is allowed must work in the same
//! sandbox: one that is merely broken proves nothing.

mod addresses;
mod clients;
mod load;
mod many;
mod names;
mod packets;
mod policy;
mod rebinding;
mod requests;
mod resolvers;
mod restart;
mod reuse;
mod speed;

use k8e_e2e::internet::{CDN, DNS, Destination, Internet};
use k8e_e2e::{Ran, Server, Session};
use serde_json::Value;
use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

/// Every kind of sandbox.
const RUNTIMES: [&str; 2] = ["native", "gvisor"];

/// What attempts send along; it arrives nowhere.
const SECRET: &str = "k8e-secret";

/// The name that is allowed in most tests.
const GOOD: &str = "good.example";

/// Python for attempts.
const PRELUDE: &str = include_str!("egress/inside.py");

/// Where a sandbox finds the certificate of the miniature internet.
const AUTHORITY: &str = "/tmp/ca.pem";

/// How long something may take that follows from something else.
const FOLLOWS: Duration = Duration::from_secs(10);

/// A server on the host of a miniature internet.
struct World {
    // Ends first.
    server: Server,
    internet: Internet,
}

/// A sandbox in it, and what may arrive from there.
struct Inside<'a> {
    world: &'a World,
    internet: &'a Internet,
    session: Session<'a>,
    bounds: RefCell<Bounds>,
}

struct Bounds {
    places: Vec<(IpAddr, u16)>,
    names: Vec<String>,
}

/// Tries something with these rules in a sandbox of each runtime. Afterwards nothing has arrived
/// but what is within its bounds, and what is allowed works.
fn everywhere(rules: &str, attempt: impl Fn(&Inside<'_>)) {
    World::start(&[]).everywhere(rules, attempt);
}

// === impl World ===

impl World {
    fn start(flags: &[&str]) -> Self {
        let internet = Internet::start();
        let server = Server::start_on(&internet, flags);
        Self { server, internet }
    }

    fn everywhere(&self, rules: &str, attempt: impl Fn(&Inside<'_>)) {
        for runtime in RUNTIMES {
            let inside = self.session(runtime, &["--allowed-hosts", rules]);
            attempt(&inside);
            inside.works();
            inside.assert_bounds();
            inside.session.destroy();
        }
    }

    /// A session of a runtime; what arrived before is forgotten.
    fn session(&self, runtime: &str, flags: &[&str]) -> Inside<'_> {
        let flags = [&["--runtime", runtime], flags].concat();
        let session = self.server.session_with(&flags);
        let authority = self.internet.authority();
        let ran = session.sh(&format!("cat > {AUTHORITY} <<'EOF'\n{authority}EOF"));
        assert_eq!(ran.code, 0, "{}", ran.all());
        self.internet.forget();
        Inside {
            world: self,
            internet: &self.internet,
            session,
            bounds: RefCell::new(Bounds {
                places: vec![(CDN.into(), 80), (CDN.into(), 443)],
                names: vec![GOOD.to_owned()],
            }),
        }
    }
}

// === impl Inside ===

impl Inside<'_> {
    /// An attempt in Python: it was made, and got nothing.
    fn tries(&self, script: &str) -> Ran {
        let ran = self.python(script);
        assert!(ran.out().contains("tried"), "not tried: {}", ran.all());
        assert!(!ran.out().contains("ESCAPED"), "{}", ran.all());
        ran
    }

    /// An attempt with the programs that everybody has.
    fn tries_sh(&self, script: &str) -> Ran {
        let ran = self.session.sh(script);
        assert!(ran.out().contains("tried"), "not tried: {}", ran.all());
        assert!(!ran.out().contains("ESCAPED"), "{}", ran.all());
        ran
    }

    /// Runs Python inside, to its end.
    fn python(&self, script: &str) -> Ran {
        let ran = self.session.py(&format!("{PRELUDE}\n{script}"));
        assert_eq!(ran.code, 0, "{}", ran.all());
        ran
    }

    /// Runs a shell script inside, which must succeed; what it printed.
    fn sh(&self, script: &str) -> String {
        let ran = self.session.run(&["--timeout", "300"], script);
        assert_eq!(ran.code, 0, "{script}\n{}", ran.all());
        ran.out()
    }

    /// Fetches something with curl; what was answered, and nothing when that failed or was refused.
    fn curl(&self, args: &str) -> Option<String> {
        let curl = format!("curl -sS --fail --max-time 20 --cacert {AUTHORITY} {args}");
        let ran = self.session.sh(&curl);
        // 127 is no curl: that shall not pass for a defence.
        assert!(ran.code < 126, "{}", ran.all());
        (ran.code == 0).then(|| ran.out())
    }

    /// What is allowed works.
    fn works(&self) {
        let story = self.curl(&format!("https://{GOOD}/works"));
        let story = story.unwrap_or_else(|| panic!("what is allowed fails: {}", self.story()));
        assert!(story.contains(GOOD), "{story}");
        let arrived = self.internet.log().requests();
        let arrived = arrived.iter().any(|request| request.target == "/works");
        assert!(arrived, "it was answered by somebody else: {story}");
    }

    /// That something more may arrive.
    fn may_reach(&self, address: impl Into<IpAddr>, port: u16) {
        self.bounds.borrow_mut().places.push((address.into(), port));
    }

    /// That somebody more may be asked for.
    fn may_name(&self, name: &str) {
        self.bounds.borrow_mut().names.push(name.to_owned());
    }

    /// Nothing arrived but what may.
    fn assert_bounds(&self) {
        self.internet.settle();
        let bounds = self.bounds.borrow();
        let allowed = |to: &Destination| {
            let place = (to.address, to.port);
            to.protocol == 6 && bounds.places.contains(&place)
        };
        let mut reached = self.internet.reached();
        reached.retain(|to, _| !allowed(to));
        assert!(reached.is_empty(), "packets arrived: {reached:#?}");
        let host = self.internet.reached_host();
        assert!(host.is_empty(), "packets arrived at the host: {host:#?}");
        for log in [self.internet.log(), self.internet.host_log()] {
            assert!(!log.contains(SECRET.as_bytes()), "{}", self.story());
        }
        let named = |name: &str| bounds.names.iter().any(|allowed| allowed == name);
        for request in self.internet.log().requests() {
            let host = request.host.to_ascii_lowercase();
            let host = host.split(':').next().unwrap_or_default();
            let tls = request.tls_name.as_deref();
            assert!(named(host) && tls.is_none_or(named), "{request:?}");
        }
        for query in self.internet.log().queries() {
            assert!(query.kind == 1 && named(&query.name), "{query:?}");
        }
    }

    /// Nothing was asked of any resolver.
    fn assert_not_asked(&self) {
        let queries = self.internet.log().queries();
        assert!(queries.is_empty(), "{queries:?}");
    }

    /// Nobody but the resolver was reached at this address.
    fn assert_not_reached(&self, address: Ipv4Addr) {
        self.internet.settle();
        let mut reached = self.internet.log().packets();
        reached.retain(|to, _| to.address == address && address != DNS);
        assert!(reached.is_empty(), "packets arrived: {reached:#?}");
    }

    /// What the server says of attempts that it denied.
    fn denials(&self) -> Vec<Value> {
        let told = self
            .world
            .server
            .k8e(&["sandbox", "egress", &self.session.id]);
        let told = told.json();
        let flows = told["flows"].as_array().cloned().unwrap_or_default();
        let denied = |flow: &Value| flow["verdict"] == "denied";
        flows.into_iter().filter(denied).collect()
    }

    /// That an attempt was denied, everybody can see.
    fn assert_denied(&self, expected: Value) {
        let expected = expected.as_object().expect("some fields");
        let deadline = Instant::now() + FOLLOWS;
        loop {
            let denials = self.denials();
            let is = |flow: &Value| expected.iter().all(|(field, value)| flow[field] == *value);
            if denials.iter().any(is) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{expected:?} is not among {denials:#?}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Gives it other rules.
    fn allow(&self, rules: &str) {
        let args = [
            "sandbox",
            "allow-hosts",
            rules,
            "--session-id",
            &self.session.id,
        ];
        let ran = self.world.server.k8e(&args);
        assert_eq!(ran.code, 0, "{}", ran.all());
    }

    /// Everything that is known, for a failed assertion.
    fn story(&self) -> String {
        format!(
            "requests {:#?}\nconnections {:#?}\nqueries {:#?}\ndenied {:#?}",
            self.internet.log().requests(),
            self.internet.log().connections(),
            self.internet.log().queries(),
            self.denials(),
        )
    }
}

/// Waits until something is so.
fn becomes(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + FOLLOWS;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
