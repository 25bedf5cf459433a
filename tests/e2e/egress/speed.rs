//! What the gate costs: the same download by the same program, on the host and in a sandbox, in
//! turn. Prints ratios; docs/benchmarks.md has those of a quiet machine.
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
fn curl(url: &str, authority: &str) -> String {
    format!(
        "curl -sS --fail --max-time 120 --cacert {authority} -o /dev/null -w '%{{time_connect}} %{{time_total}}' \
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
    let inside = world.session("native", &["--allowed-hosts", GOOD]);
    for scheme in ["https", "http"] {
        let url = format!("{scheme}://good.example/bytes/{BYTES}");
        let on_host = || {
            let curl = curl(&url, authority.path().to_str().unwrap());
            let out = world.internet.on_host("sh", &["-c", &curl]);
            assert!(out.status.success(), "{out:?}");
            times(&String::from_utf8(out.stdout).unwrap())
        };
        let in_sandbox = || times(&inside.sh(&curl(&url, AUTHORITY)));
        let (mut host, mut sandbox) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            host.push(on_host());
            sandbox.push(in_sandbox());
        }
        let pick = |from: &[(f64, f64)], which: fn(&(f64, f64)) -> f64| {
            median(from.iter().map(which).collect())
        };
        let (host_all, all) = (pick(&host, |t| t.1), pick(&sandbox, |t| t.1));
        let (host_connect, connect) = (pick(&host, |t| t.0), pick(&sandbox, |t| t.0));
        let ratio = all / host_all;
        println!(
            "{scheme}: 200 MB in {all:.3} s through the gate, {host_all:.3} s on the host: {ratio:.2} x; \
             connect {:.3} ms and {:.3} ms",
            connect * 1e3,
            host_connect * 1e3
        );
        assert!(ratio < RATIO_MAX, "{scheme}: {ratio:.2}");
    }
    inside.session.destroy();
}
