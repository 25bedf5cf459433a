//! Many sessions at once, each with rules of its own that change all the time: whatever arrives was
//! allowed to whoever sent it, when it did.

use super::{PRELUDE, World};
use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const SESSIONS: usize = 200;
const HOSTS: usize = 12;

/// Short, because it is one of many tests; `K8E_EGRESS_SECONDS` can make it longer.
const LASTS_SECONDS: u64 = 20;
const LASTS_SECONDS_MAX: u64 = 600;

/// Who changes rules at the same time.
const CHANGERS: usize = 3;

/// What each session does: asks a host by its name, one after the other, and tells it who asks
/// and when it began to. Some addresses are asked without a name first.
const ASK: &str = r#"
import random
me, hosts = int(sys.argv[1]), int(sys.argv[2])
random.seed(me)
known = {}
while True:
    host = random.randrange(hosts); name = f"h{host}.many.example"
    begun = time.time()
    if host not in known or random.random() < 0.3:
        found = resolve(name)
        if found: known[host] = found[0]
    address = known.get(host, f"45.10.5.{host}")
    path = f"/from/{me}/{begun:.6f}"
    try:
        with socket.create_connection((address, 80), 2) as s:
            s.settimeout(2); s.sendall(get(name, path)); s.recv(4096)
    except OSError: pass
    time.sleep(0.2 + random.random())
"#;

/// Rules from when on they held. While they were being changed, both did.
#[derive(Debug)]
struct Change {
    /// When it was asked for.
    asked: f64,
    /// When it was answered.
    answered: f64,
    hosts: HashSet<usize>,
}

fn lasts() -> Duration {
    let asked = std::env::var("K8E_EGRESS_SECONDS").ok();
    let seconds = asked.and_then(|asked| asked.parse().ok());
    Duration::from_secs(seconds.unwrap_or(LASTS_SECONDS).min(LASTS_SECONDS_MAX))
}

fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap().as_secs_f64()
}

/// Numbers that nobody needs to guess, the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        usize::try_from(self.0 >> 33).unwrap() % bound
    }

    fn hosts(&mut self) -> HashSet<usize> {
        let count = 1 + self.below(3);
        (0..count).map(|_| self.below(HOSTS)).collect()
    }
}

fn rules(hosts: &HashSet<usize>) -> String {
    let mut names: Vec<_> = hosts.iter().map(|n| format!("h{n}.many.example")).collect();
    names.sort();
    names.join(",")
}

/// Whether rules that held at some time between the two allowed the host.
fn was_allowed(changes: &[Change], host: usize, from: f64, to: f64) -> bool {
    changes.iter().enumerate().any(|(number, change)| {
        let ended = changes
            .get(number + 1)
            .map_or(f64::INFINITY, |next| next.answered);
        change.hosts.contains(&host) && change.asked <= to && from <= ended
    })
}

#[test]
fn what_was_allowed_when() {
    let change = |asked: f64, answered: f64, host: usize| Change {
        asked,
        answered,
        hosts: HashSet::from([host]),
    };
    let changes = [change(0.0, 1.0, 7), change(5.0, 6.0, 8)];
    // The old rules may hold until the new ones were answered for, these from when they were asked for.
    for (host, from, to, expected) in [
        (7, 2.0, 3.0, true),
        (7, 5.9, 9.0, true),
        (7, 6.1, 9.0, false),
        (8, 4.0, 4.9, false),
        (8, 4.0, 5.1, true),
        (8, 100.0, 101.0, true),
        (9, 0.0, 101.0, false),
    ] {
        assert_eq!(
            was_allowed(&changes, host, from, to),
            expected,
            "{host} {from} {to}"
        );
    }
}

#[test]
fn nothing_arrives_that_was_not_allowed_then() {
    let world = World::start(&["--max-sessions", "400"]);
    for host in 0..HOSTS {
        let address = Ipv4Addr::new(45, 10, 5, u8::try_from(host).unwrap());
        world
            .internet
            .zone()
            .address(&format!("h{host}.many.example"), &[address]);
    }
    let mut random = Random(4);
    let mut timelines = Vec::new();
    let mut sessions = Vec::new();
    for number in 0..SESSIONS {
        let hosts = random.hosts();
        let asked = now();
        let limits = ["--memory", "128MiB", "--cpus", "0.5"];
        let allowed = rules(&hosts);
        let flags = [&["--allowed-hosts", allowed.as_str()], &limits[..]].concat();
        let session = world.server.session_with(&flags);
        let change = Change {
            asked,
            answered: now(),
            hosts,
        };
        timelines.push(Mutex::new(vec![change]));
        let script = format!(
            "cat > /tmp/ask.py <<'EOF'\n{PRELUDE}\n{ASK}\nEOF\nsetsid python3 /tmp/ask.py {number} {HOSTS} >/dev/null 2>&1 &"
        );
        assert_eq!(session.sh(&script).code, 0);
        sessions.push(session.id);
    }
    world.internet.log().forget();
    let began = now();
    std::thread::scope(|scope| {
        for changer in 0..CHANGERS {
            let (world, sessions, timelines) = (&world, &sessions, &timelines);
            let mut random = Random(changer as u64 + 100);
            scope.spawn(move || {
                let begun = Instant::now();
                while begun.elapsed() < lasts() {
                    // Each has its own sessions to change: their order is known.
                    let of = SESSIONS / CHANGERS;
                    let number = changer * of + random.below(of);
                    let hosts = random.hosts();
                    let rules = rules(&hosts);
                    let asked = now();
                    let args = [
                        "sandbox",
                        "allow-hosts",
                        &rules,
                        "--session-id",
                        &sessions[number],
                    ];
                    let ran = world.server.k8e(&args);
                    assert_eq!(ran.code, 0, "{}", ran.all());
                    timelines[number].lock().unwrap().push(Change {
                        asked,
                        answered: now(),
                        hosts,
                    });
                }
            });
        }
    });
    let ended = now();
    let requests = world.internet.log().requests();
    let mut heard_of = HashSet::new();
    for request in &requests {
        let mut parts = request.target.trim_start_matches("/from/").split('/');
        let number: usize = parts.next().unwrap().parse().unwrap();
        let sent: f64 = parts.next().unwrap().parse().unwrap();
        let host = request
            .host
            .trim_start_matches('h')
            .split('.')
            .next()
            .unwrap();
        let host: usize = host.parse().unwrap();
        let address = Ipv4Addr::new(45, 10, 5, u8::try_from(host).unwrap());
        assert_eq!(request.local.ip(), address, "{request:?}");
        let arrived = now() - request.at.elapsed().as_secs_f64();
        let changes = timelines[number].lock().unwrap();
        assert!(
            was_allowed(&changes, host, sent, arrived),
            "{request:?} sent {sent} arrived {arrived}, but {changes:#?}"
        );
        heard_of.insert(number);
    }
    let changes: usize = timelines
        .iter()
        .map(|one| one.lock().unwrap().len() - 1)
        .sum();
    eprintln!(
        "{} requests of {} sessions, {changes} changes in {:.0} s",
        requests.len(),
        heard_of.len(),
        ended - began
    );
    // It was not just quiet.
    assert!(
        heard_of.len() > SESSIONS / 2,
        "{} sessions were heard of",
        heard_of.len()
    );
    assert!(
        requests.len() > SESSIONS,
        "{} requests in {} s",
        requests.len(),
        ended - began
    );
    assert!(changes > 100, "{changes} changes");
}
