//! What every driver must do, as one list: the same behaviour whatever isolates the sandbox.
//!
//! A driver's tests say how to start it and how to look for what it leaves behind ([`Subject`]),
//! and [`conformance!`](macro@crate::conformance) makes a test of each behaviour.

mod call;
pub mod commands;
pub mod files;
pub mod life;
pub mod limits;
pub mod terminals;

pub use call::Ran;

use call::Host;
use k8e_driver::{Driver, Sandbox, SandboxSpec};
use k8e_model::{Limits, SandboxId, Template};
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

/// No behaviour takes longer, on a machine that runs other tests as well.
const PATIENCE: Duration = Duration::from_secs(120);

/// A driver under test.
pub trait Subject {
    /// Starts it, as a server does; again on the same data, as the next server does.
    fn start(&self) -> Arc<dyn Driver>;

    /// Kills a sandbox from outside, as the machine's administrator could.
    fn kill(&self, id: &SandboxId);

    /// Everything of its sandboxes that the machine holds.
    fn traces(&self) -> Vec<String>;
}

/// A driver at work.
pub struct Lab {
    subject: Box<dyn Subject>,
    driver: Arc<dyn Driver>,
}

/// A sandbox at work.
pub struct Cell {
    /// Its name.
    pub id: SandboxId,
    /// The driver's handle.
    pub sandbox: Box<dyn Sandbox>,
}

/// Makes a test of every behaviour; `$subject` is an expression that makes a [`Subject`].
#[macro_export]
macro_rules! conformance {
    ($subject:expr) => {
        $crate::conformance!(@ $subject;
            commands: commands_say_how_they_ended, the_next_command_runs_whatever_was_killed,
                output_comes_apart_and_whole,
                input_reaches_the_command, signals_reach_the_command, a_timeout_ends_everything,
                cancelling_ends_everything, what_runs_in_the_background_stays,
                detached_runs_outlive_their_connection,
                users_are_told_apart, programs_see_a_whole_system, loopback_is_all_there_is,
                local_sockets_work;
            terminals: terminals_are_terminals, the_foreground_is_known, terminals_end_whole;
            files: files_come_and_go, links_do_not_lead_out, the_hosts_files_are_not_there;
            limits: processes_are_limited, memory_is_limited, disk_is_limited,
                limits_can_be_bound_late;
            life: sandboxes_outlive_the_server, destroying_leaves_nothing, death_is_noticed,
                leftovers_are_swept, many_at_once, nothing_is_shared,
                frozen_is_frozen, frozen_is_destroyed, frozen_is_swept;
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

/// Runs one behaviour, and sees to it that nothing stays.
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
    // A test that failed leaves nothing either.
    let swept = runtime.block_on(lab.driver.sweep(&HashSet::new()));
    if let Err(panic) = done {
        resume_unwind(panic);
    }
    swept.expect("everything can be swept");
    runtime.block_on(lab.no_traces());
}

// === impl Lab ===

impl Lab {
    /// A sandbox with the usual limits.
    pub async fn launch(&self) -> Cell {
        self.launch_with(Limits::default()).await
    }

    /// A sandbox with these limits.
    pub async fn launch_with(&self, limits: Limits) -> Cell {
        let spec = SandboxSpec {
            id: SandboxId::random(),
            template: Template::Host,
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

    /// Ends the driver and starts it again on the same data.
    pub fn restart(&mut self) {
        // The old one goes first: it shares a lock with its launcher.
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
    /// How to call its guest.
    fn host(&self) -> Host<'_> {
        Host(self.sandbox.guest())
    }

    /// Runs a shell script as root, to its end.
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
