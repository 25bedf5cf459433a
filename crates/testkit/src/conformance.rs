//! Driver conformance suite: behaviour that every driver must have, whatever isolates its sandboxes.
//!
//! The tests of a driver implement [`Subject`] (how to start it, how to find leftovers), and
//! [`conformance!`](macro@crate::conformance) generates a test for each behaviour.

mod call;
pub mod commands;
pub mod files;
pub mod lifecycle;
pub mod limits;
pub mod terminals;

pub use call::Ran;

use call::Host;
use k8e_driver::{Driver, Restored, Sandbox, SandboxSpec};
use k8e_model::{Limits, SandboxId, Template};
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Deadline of one test, on a machine that runs other tests as well.
const PATIENCE: Duration = Duration::from_secs(120);

/// A driver under test.
pub trait Subject {
    /// Starts the driver, as a server does; later calls use the same data directory, as after a restart.
    fn start(&self) -> Arc<dyn Driver>;

    /// Kills a sandbox from outside, as root on the host could.
    fn kill(&self, id: &SandboxId);

    /// Leftovers of sandboxes on the host: processes, cgroups, mounts, files.
    fn traces(&self) -> Vec<String>;
}

/// A running driver under test.
pub struct Lab {
    subject: Box<dyn Subject>,
    driver: Arc<dyn Driver>,
}

/// A running sandbox under test.
pub struct Cell {
    /// The id it was launched with.
    pub id: SandboxId,
    /// The handle that the driver returned.
    pub sandbox: Box<dyn Sandbox>,
}

/// Generates a test for each behaviour; `$subject` is an expression that makes a [`Subject`].
#[macro_export]
macro_rules! conformance {
    ($subject:expr) => {
        $crate::conformance!(@ $subject;
            commands: commands_report_exit_codes_and_signals,
                a_command_runs_after_all_processes_were_killed,
                output_streams_are_separate_and_complete, input_reaches_the_command,
                signals_reach_the_command, a_timeout_kills_the_process_tree,
                cancelling_kills_the_process_tree, background_processes_survive_their_command,
                detached_runs_outlive_their_connection, commands_run_as_the_requested_user,
                programs_see_a_whole_system, loopback_is_the_only_network, local_sockets_work;
            terminals: terminals_support_resize_and_control_characters,
                the_foreground_process_group_is_known, ending_a_terminal_kills_its_process_tree;
            files: files_can_be_written_read_listed_moved_removed, symlinks_do_not_escape_the_root,
                the_hosts_files_are_not_there;
            limits: processes_are_limited, memory_is_limited, page_cache_is_reclaimed_before_oom_kills,
                disk_is_limited, limits_can_be_changed_after_launch;
            lifecycle: sandboxes_outlive_the_server, destroying_leaves_nothing,
                a_dead_sandbox_is_reported, unknown_sandboxes_are_swept,
                concurrent_launches_do_not_interfere, a_thousand_concurrent_destroys,
                a_dropped_destroy_still_completes, nothing_is_shared,
                freeze_stops_all_processes_until_thaw, a_frozen_sandbox_can_be_destroyed,
                a_frozen_sandbox_can_be_swept;
        );
    };
    (@ $subject:expr; $($group:ident: $($name:ident),+;)+) => {
        $($(
            #[test]
            fn $name() {
                $crate::conformance::run(Box::new($subject), $crate::conformance::$group::$name);
            }
        )+)+
    };
}

/// Runs one test, and checks that it leaves nothing on the host.
pub fn run(subject: Box<dyn Subject>, behaviour: impl AsyncFnOnce(&mut Lab)) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let driver = subject.start();
    let mut lab = Lab { subject, driver };
    let done = catch_unwind(AssertUnwindSafe(|| {
        let within = async { tokio::time::timeout(PATIENCE, behaviour(&mut lab)).await };
        runtime.block_on(within).expect("the test hangs");
    }));
    // Cleans up after a failed test too.
    let swept = runtime.block_on(lab.driver.sweep(&HashSet::new()));
    if let Err(panic) = done {
        resume_unwind(panic);
    }
    swept.expect("everything can be swept");
    runtime.block_on(lab.no_traces());
}

// === impl Lab ===

impl Lab {
    /// Launches a sandbox with default limits.
    pub async fn launch(&self) -> Cell {
        self.launch_with(Limits::default()).await
    }

    /// Launches a sandbox with these limits.
    pub async fn launch_with(&self, limits: Limits) -> Cell {
        let spec = SandboxSpec {
            id: SandboxId::random(),
            template: Template::Host,
            layers: Vec::new(),
            limits,
        };
        let sandbox = self.driver.launch(&spec).await;
        let sandbox = sandbox.unwrap_or_else(|error| panic!("launch: {}", chain(&error)));
        sandbox.guest().hello().await.expect("its guest answers");
        Cell {
            id: spec.id,
            sandbox,
        }
    }

    /// Launches a sandbox with default limits from a state, with the memory that is in it.
    pub async fn launch_from(&self, state: &SandboxId) -> Cell {
        let spec = SandboxSpec {
            id: SandboxId::random(),
            template: Template::Host,
            layers: Vec::new(),
            limits: Limits::default(),
        };
        let launched = self.driver.launch_from(&spec, state).await;
        let (sandbox, restored) =
            launched.unwrap_or_else(|error| panic!("launch from {state}: {}", chain(&error)));
        assert_eq!(restored, Restored::Memory);
        Cell {
            id: spec.id,
            sandbox,
        }
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Drops the driver and starts it again on the same data directory.
    pub fn restart(&mut self) {
        // Dropped first: it shares a lock with its launcher.
        self.driver = Arc::new(crate::FakeDriver::new());
        self.driver = self.subject.start();
    }

    async fn no_traces(&self) {
        for _ in 0..1000 {
            if self.subject.traces().is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("left behind: {:#?}", self.subject.traces());
    }
}

// === impl Cell ===

impl Cell {
    /// A client of its guest.
    fn host(&self) -> Host<'_> {
        Host(self.sandbox.guest())
    }

    /// Runs a shell script as root and waits for its end.
    pub async fn sh(&self, script: &str) -> Ran {
        let ran = self.host().exec(call::sh(script)).await;
        ran.unwrap_or_else(|error| panic!("{script}: {error:?}"))
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    }
}
