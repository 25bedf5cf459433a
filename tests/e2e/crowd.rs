//! Two hundred clients at once, each calling whatever comes to its mind: nobody gets an error that is not a documented
//! limit, the server's memory stays, and nothing is left afterwards.
//!
//! Ten seconds in CI; `K8E_LOAD_SECONDS=180 cargo xtask test -p k8e-e2e --test e2e -- crowd --nocapture` is the whole of it,
//! and prints how long each call took.

mod calls;
mod others;

use calls::Caller;
use k8e_api::client::Endpoint;
use k8e_e2e::Server;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const CLIENTS: usize = 200;

/// In CI, where others want their turn as well.
const SECONDS: u64 = 10;

/// Only a run that is this long shows whether memory grows.
const SECONDS_FOR_MEMORY: u64 = 60;

/// What the server may hold more at the end than when two thirds of the time were over.
const GROWTH_MAX: f64 = 1.1;

/// Descriptors of a server that has nothing left to do: those of caches and of threads that came to be.
const DESCRIPTORS_MORE_MAX: usize = 32;

/// How long calls took, by name.
type Times = Arc<Mutex<BTreeMap<&'static str, Vec<Duration>>>>;

#[test]
fn two_hundred_clients_call_everything() {
    let seconds = std::env::var("K8E_LOAD_SECONDS").ok();
    let seconds = seconds.map_or(SECONDS, |seconds| seconds.parse().unwrap());
    let flags = ["--default-runtime", "native", "--max-sessions", "600"];
    let mut server = Server::start_with(
        &[
            &flags[..],
            &[
                "--expose-listen",
                "127.0.0.1:0",
                "--pool-min",
                "0",
                "--pool-max",
                "8",
            ],
        ]
        .concat(),
    );
    server.session().destroy();
    let descriptors = descriptors(server.pid());
    let times = Times::default();
    let memory = tokio::runtime::Runtime::new().unwrap().block_on(load(
        &server,
        Duration::from_secs(seconds),
        &times,
    ));
    println!("{}", table(&times));
    println!("server memory, MB each second: {memory:?}");
    if seconds >= SECONDS_FOR_MEMORY {
        // What sessions keep of their runs and terminals has bounds, and fills up to them first.
        let last = &memory[memory.len() * 2 / 3..];
        let (from, to) = (last[0], last[last.len() - 1]);
        assert!(to < from * GROWTH_MAX, "memory grew from {from} to {to} MB");
    }
    assert_eq!(server.session_ids(), Vec::<String>::new());
    settle(server.pid(), descriptors);
    server.stop();
    server.assert_traces(0);
}

/// Lets all of them call until the time is over, and returns the server's memory meanwhile.
async fn load(server: &Server, time: Duration, times: &Times) -> Vec<f64> {
    let (endpoint, until) = (Endpoint::Unix(server.socket()), Instant::now() + time);
    let mut clients = tokio::task::JoinSet::new();
    for seed in 0..CLIENTS {
        let (endpoint, times) = (endpoint.clone(), Arc::clone(times));
        clients.spawn(async move {
            let mut caller = Caller::connect(&endpoint, seed as u64 + 1, times).await;
            while Instant::now() < until {
                caller.call().await;
            }
            caller.leave().await;
        });
    }
    let mut memory = Vec::new();
    let mut second = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            _ = second.tick() => memory.push(resident_mb(server.pid())),
            ended = clients.join_next() => match ended {
                Some(ended) => ended.unwrap(),
                None => return memory,
            },
        }
    }
}

fn table(times: &Times) -> String {
    let mut times = times.lock().unwrap();
    let calls: usize = times.values().map(Vec::len).sum();
    let mut table = format!("{calls} calls; ms:          p50      p99      max\n");
    for (name, times) in times.iter_mut() {
        times.sort();
        let ms = |place: usize| times[place].as_secs_f64() * 1e3;
        let (count, half, most) = (times.len(), times.len() / 2, times.len() * 99 / 100);
        let (half, most, max) = (ms(half), ms(most), ms(count - 1));
        writeln!(
            table,
            "{name:20} {half:8.1} {most:8.1} {max:8.1}  {count} times"
        )
        .unwrap();
    }
    table
}

fn resident_mb(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    let kb: f64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    (kb * 1024.0 / 1e5).round() / 10.0
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .count()
}

/// Waits until the server has let go of what it held for its clients. Its pool keeps some sandboxes.
fn settle(pid: u32, before: usize) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let now = descriptors(pid);
        // A warm sandbox of the pool has a process, a namespace and the sockets of its gate.
        if now <= before + DESCRIPTORS_MORE_MAX + 8 * 8 {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{now} descriptors, and {before} before"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
}
