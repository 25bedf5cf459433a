//! What the gate costs: the same download by the same program, on the host and in a sandbox, in
//! turn; kept in memory, as whoever downloads something keeps it, and thrown away. Prints ratios; docs/benchmarks.md has those of a quiet machine.
//!
//! `cargo xtask test -p k8e-e2e --test e2e -- egress::speed --nocapture`

use super::*;

const BYTES: u64 = 200_000_000;
const ROUNDS: usize = 7;

/// A gate that has become a brake, whatever else the machine does meanwhile.
const RATIO_MAX: f64 = 3.0;

/// Half of them took no longer.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// `curl` says how long a connection took, and all of it.
fn curl(url: &str, authority: &str, to: &str) -> String {
    format!(
        "curl -sS --fail --max-time 120 --cacert {authority} -o {to} -w '%{{time_connect}} %{{time_total}}' \
         --resolve good.example:443:{CDN} --resolve good.example:80:{CDN} {url}"
    )
}

fn times(said: &str) -> (f64, f64) {
    let (connect, total) = said.trim().split_once(' ').unwrap();
    (connect.parse().unwrap(), total.parse().unwrap())
}

#[test]
fn a_download_through_the_gate() {
    let world = World::start(&[]);
    let authority = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(authority.path(), world.internet.authority()).unwrap();
    // The same kind of file system on both sides.
    let saved = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    let inside = world.session("native", &["--allowed-hosts", GOOD]);
    let kept = saved.path().to_str().unwrap();
    for (scheme, how, on_host, in_sandbox) in [
        ("https", "saved", kept, "/dev/shm/saved"),
        ("http", "saved", kept, "/dev/shm/saved"),
        ("https", "thrown away", "/dev/null", "/dev/null"),
        ("http", "thrown away", "/dev/null", "/dev/null"),
    ] {
        let url = format!("{scheme}://good.example/bytes/{BYTES}");
        let by_host = || {
            let curl = curl(&url, authority.path().to_str().unwrap(), on_host);
            let out = world.internet.on_host("sh", &["-c", &curl]);
            assert!(out.status.success(), "{out:?}");
            times(&String::from_utf8(out.stdout).unwrap())
        };
        let by_sandbox = || times(&inside.sh(&curl(&url, AUTHORITY, in_sandbox)));
        let (mut host, mut sandbox) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            host.push(by_host());
            sandbox.push(by_sandbox());
        }
        let pick = |from: &[(f64, f64)], which: fn(&(f64, f64)) -> f64| {
            median(from.iter().map(which).collect())
        };
        let (host_all, all) = (pick(&host, |t| t.1), pick(&sandbox, |t| t.1));
        let (host_connect, connect) = (pick(&host, |t| t.0), pick(&sandbox, |t| t.0));
        let ratio = all / host_all;
        println!(
            "{scheme}, {how}: 200 MB in {all:.3} s through the gate, {host_all:.3} s on the host: {ratio:.2} x; \
             connect {:.3} ms and {:.3} ms",
            connect * 1e3,
            host_connect * 1e3
        );
        assert!(ratio < RATIO_MAX, "{scheme}: {ratio:.2}");
    }
    inside.session.destroy();
}
