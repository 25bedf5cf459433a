//! How many sandboxes a second, with many clients at once.
//!
//! Each takes its turn twice, for half of the time. What waited in a pool before is not counted:
//! the rate is that at which sandboxes are made, used and removed, however long it goes on.

use super::bar::{Bar, Ratio};
use super::host::Programs;
use super::server::{Server, Start, joined};
use super::subject::Host;
use crate::Globals;
use crate::connect::connect;
use crate::failure::Failure;
use crate::output;
use k8e_model::RuntimeKind;
use serde::Serialize;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// So that what disturbs the machine for a while disturbs more than one.
const TURNS: u32 = 2;

/// Bar of native create+exec+destroy, as a multiple of `crun run`. The goal is 2.0 (docs/benchmarks.md).
const NATIVE_BAR: Bar = Bar::AtLeast(1.0);

/// How often the loops of the host are looked after.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// What it came to.
#[derive(Debug, Serialize)]
pub(super) struct Throughput {
    pub(super) clients: u32,
    pub(super) rows: Vec<Row>,
}

/// One who makes sandboxes.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) group: &'static str,
    pub(super) name: &'static str,
    pub(super) seconds: f64,
    /// Those that were made, used and removed.
    pub(super) done: u64,
    /// Of those, the ones that had waited in the pool before.
    pub(super) from_stock: u64,
    pub(super) per_s: f64,
    pub(super) ratio: Option<Ratio>,
}

/// How many clients, and for how long.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) clients: u32,
    pub(super) time: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    done: u64,
    from_stock: u64,
    time: Duration,
}

/// Loops on threads of their own, which end with this.
struct Loops {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<io::Result<u64>>>,
}

pub(super) async fn measure(
    programs: &Arc<Programs>,
    server: &Server,
    globals: &Globals,
    runtimes: &[RuntimeKind],
    load: Load,
) -> Result<Throughput, Failure> {
    let with_crun = programs.usable().contains(&Host::Crun);
    let turn = Load {
        time: load.time / TURNS,
        ..load
    };
    let mut crun = Count::default();
    let mut ours = vec![Count::default(); runtimes.len()];
    let mut server = server.clone();
    for _ in 0..TURNS {
        if with_crun {
            server.settle(runtimes).await?;
            output::progress("throughput: crun run");
            crun.add(host_loops(programs, Host::Crun, turn).await?);
        }
        for (runtime, count) in runtimes.iter().zip(&mut ours) {
            server.settle(runtimes).await?;
            output::progress(&format!("throughput: {runtime}"));
            count.add(our_loops(&mut server, globals, *runtime, turn).await?);
        }
    }
    let host = with_crun.then(|| crun.row("host", Host::Crun.name(), None));
    let base = host.as_ref().map(|row| row.per_s);
    let mut rows: Vec<Row> = host.into_iter().collect();
    for (runtime, count) in runtimes.iter().zip(ours) {
        let bar = (*runtime == RuntimeKind::Native).then_some(NATIVE_BAR);
        rows.push(count.row(runtime.as_str(), "create+exec+destroy", Some((base, bar))));
    }
    Ok(Throughput {
        clients: load.clients,
        rows,
    })
}

/// As many loops of a program as there are clients.
async fn host_loops(programs: &Arc<Programs>, host: Host, load: Load) -> Result<Count, Failure> {
    let failed = |e: io::Error| Failure::io(&format!("measure {}", host.name()), &e);
    let mut loops = Loops {
        stop: Arc::default(),
        threads: Vec::new(),
    };
    let begin = Instant::now();
    for _ in 0..load.clients {
        let (programs, stop) = (Arc::clone(programs), Arc::clone(&loops.stop));
        let work = move || {
            programs.prepare_thread(host)?;
            let mut done = 0;
            while begin.elapsed() < load.time && !stop.load(Ordering::Relaxed) {
                programs.time_here(host)?;
                done += 1;
            }
            Ok(done)
        };
        let thread = std::thread::Builder::new().spawn(work).map_err(failed)?;
        loops.threads.push(thread);
    }
    // Not joined at once: somebody may interrupt us.
    while loops.threads.iter().any(|thread| !thread.is_finished()) {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let time = begin.elapsed();
    let mut done = 0;
    for thread in loops.threads.drain(..) {
        let panicked = |_| Err(io::Error::other("a thread panicked"));
        done += thread.join().unwrap_or_else(panicked).map_err(failed)?;
    }
    Ok(Count {
        done,
        from_stock: 0,
        time,
    })
}

/// As many loops of ours as there are clients, each with its own connection.
async fn our_loops(
    server: &mut Server,
    globals: &Globals,
    runtime: RuntimeKind,
    load: Load,
) -> Result<Count, Failure> {
    let mut clients = Vec::new();
    for _ in 0..load.clients {
        clients.push(server.over(connect(globals).await?));
    }
    let ready_before = ready(server, runtime).await?;
    let begin = Instant::now();
    let mut loops = JoinSet::new();
    for mut client in clients {
        loops.spawn(async move {
            let mut done = 0;
            while begin.elapsed() < load.time {
                let session_id = client.create(runtime, Start::Warm).await?;
                client.exec_true(session_id.clone()).await?;
                client.destroy(session_id).await?;
                done += 1;
            }
            Ok::<u64, Failure>(done)
        });
    }
    let mut done = 0;
    while let Some(ended) = loops.join_next().await {
        done += joined(Some(ended))?;
    }
    let time = begin.elapsed();
    let ready_after = ready(server, runtime).await?;
    Ok(Count {
        done,
        from_stock: ready_before.saturating_sub(ready_after).min(done),
        time,
    })
}

async fn ready(server: &mut Server, runtime: RuntimeKind) -> Result<u64, Failure> {
    let pools = server.pools(&[runtime]).await?;
    Ok(pools.iter().map(|pool| u64::from(pool.ready)).sum())
}

// === impl Count ===

impl Count {
    fn add(&mut self, other: Self) {
        self.done += other.done;
        self.from_stock += other.from_stock;
        self.time += other.time;
    }

    fn row(
        self,
        group: &'static str,
        name: &'static str,
        against: Option<(Option<f64>, Option<Bar>)>,
    ) -> Row {
        let seconds = self.time.as_secs_f64();
        let made = (self.done - self.from_stock) as f64;
        let per_s = if seconds > 0.0 { made / seconds } else { 0.0 };
        let ratio = |(base, bar)| Ratio::new("per_s", per_s, Host::Crun.name(), base, bar);
        Row {
            group,
            name,
            seconds,
            done: self.done,
            from_stock: self.from_stock,
            per_s,
            ratio: against.map(ratio),
        }
    }
}

// === impl Loops ===

impl Drop for Loops {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waited_in_the_pool_is_not_what_was_made() {
        let mut count = Count::default();
        for from_stock in [10, 0] {
            count.add(Count {
                done: 40,
                from_stock,
                time: Duration::from_secs(1),
            });
        }
        let row = count.row("native", "x", Some((Some(10.0), Some(NATIVE_BAR))));
        assert_eq!((row.done, row.from_stock, row.per_s), (80, 10, 35.0));
        let ratio = row.ratio.unwrap();
        assert_eq!(ratio.text(), "3.50 × crun run, ≥ 1.00 ok");
        assert_eq!(Count::default().row("host", "x", None).per_s, 0.0);
    }

    #[tokio::test]
    async fn loops_run_side_by_side_and_end() {
        let programs = Arc::new(Programs::find(&[Host::ForkExec], &mut Vec::new()).unwrap());
        let load = Load {
            clients: 2,
            time: Duration::from_millis(50),
        };
        let count = host_loops(&programs, Host::ForkExec, load).await.unwrap();
        assert!(count.done >= 2, "{count:?}");
        assert!(count.time >= load.time);
    }
}
