//! What is measured, and what each is held against.

use super::bar::Bar;
use k8e_model::RuntimeKind;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// What this machine can do without us.
    Host(Host),
    /// What a runtime of the server does.
    Ours(RuntimeKind, Action),
}

/// A program of the host, from its start to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Host {
    /// `true`: the floor.
    ForkExec,
    /// `python3 -c "print(1)"`.
    Python,
    /// `true` under bubblewrap: namespaces, and little else.
    Bubblewrap,
    /// `true` in a container of crun: made, run, removed.
    Crun,
    /// The same with runc.
    Runc,
    /// The same with podman.
    Podman,
    /// The same with runsc: a kernel of its own.
    RunscRun,
    /// `true` in a container of runsc that runs already.
    RunscExec,
}

/// What we do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A new sandbox, to where it answers.
    Create,
    /// A session with a sandbox that waited for it.
    Claim,
    /// `true` in a live session.
    Exec,
    /// A session for one `true`, and its removal.
    Whole,
    /// The process `k8e sandbox run 'echo hi'`, with a session of its own.
    Cli,
    /// The process `k8e sandbox run 'print(1)' --lang python`, in a live session.
    Python,
}

/// What one figure of a subject is held against: the p50 of a program of the host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Limit {
    pub(super) percent: usize,
    pub(super) baseline: Host,
    pub(super) bar: Option<Bar>,
}

// === impl Subject ===

impl Subject {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Host(host) => host.name(),
            Self::Ours(_, action) => action.name(),
        }
    }

    /// Whose it is: the host's, or a runtime's.
    pub(super) fn group(self) -> &'static str {
        match self {
            Self::Host(_) => "host",
            Self::Ours(runtime, _) => runtime.as_str(),
        }
    }

    pub(super) fn limits(self) -> Vec<Limit> {
        let p50 = |baseline, bar: Option<f64>| Limit {
            percent: 50,
            baseline,
            bar: bar.map(Bar::AtMost),
        };
        match self {
            Self::Host(Host::ForkExec) => vec![],
            Self::Host(_) => vec![p50(Host::ForkExec, None)],
            Self::Ours(runtime, action) => {
                // Whoever has a kernel of its own is compared with who has one, too.
                let own_kernel = runtime != RuntimeKind::Native;
                let bar = |native: f64, gvisor: Option<f64>| match runtime {
                    RuntimeKind::Native => Some(native),
                    RuntimeKind::Gvisor => gvisor,
                    RuntimeKind::Firecracker | RuntimeKind::Kata => None,
                };
                match action {
                    Action::Create if own_kernel => vec![p50(Host::RunscRun, bar(0.0, Some(1.2)))],
                    Action::Create => vec![p50(Host::Bubblewrap, bar(2.0, None))],
                    Action::Claim => vec![
                        p50(Host::ForkExec, bar(1.0, Some(1.0))),
                        Limit {
                            percent: 99,
                            ..p50(Host::ForkExec, bar(5.0, Some(5.0)))
                        },
                    ],
                    Action::Exec if own_kernel => vec![p50(Host::RunscExec, bar(0.0, Some(0.5)))],
                    Action::Exec => vec![p50(Host::ForkExec, bar(2.0, None))],
                    Action::Whole if own_kernel => vec![p50(Host::RunscRun, None)],
                    Action::Whole => vec![p50(Host::Crun, None)],
                    Action::Cli => vec![p50(Host::ForkExec, bar(10.0, None))],
                    Action::Python => vec![p50(Host::Python, bar(1.6, None))],
                }
            }
        }
    }
}

// === impl Host ===

impl Host {
    /// Those that a runtime is measured beside, the floor first.
    pub(super) fn beside(runtime: RuntimeKind) -> &'static [Self] {
        match runtime {
            RuntimeKind::Native => &[
                Self::ForkExec,
                Self::Python,
                Self::Bubblewrap,
                Self::Crun,
                Self::Runc,
                Self::Podman,
            ],
            RuntimeKind::Gvisor | RuntimeKind::Kata | RuntimeKind::Firecracker => &[
                Self::ForkExec,
                Self::Python,
                Self::RunscRun,
                Self::RunscExec,
            ],
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ForkExec => "fork+exec",
            Self::Python => "python3 print(1)",
            Self::Bubblewrap => "bubblewrap",
            Self::Crun => "crun run",
            Self::Runc => "runc run",
            Self::Podman => "podman run",
            Self::RunscRun => "runsc run",
            Self::RunscExec => "runsc exec",
        }
    }

    /// The program that must be installed.
    pub(super) fn program(self) -> &'static str {
        match self {
            Self::ForkExec => "true",
            Self::Python => "python3",
            Self::Bubblewrap => "bwrap",
            Self::Crun => "crun",
            Self::Runc => "runc",
            Self::Podman => "podman",
            Self::RunscRun | Self::RunscExec => "runsc",
        }
    }
}

// === impl Action ===

impl Action {
    /// All, in the order in which they are measured.
    pub(super) const ALL: [Self; 6] = [
        Self::Create,
        Self::Claim,
        Self::Exec,
        Self::Whole,
        Self::Cli,
        Self::Python,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Create => "create, cold",
            Self::Claim => "create, warm",
            Self::Exec => "exec true",
            Self::Whole => "create+exec+destroy",
            Self::Cli => "k8e sandbox run, fresh",
            Self::Python => "k8e sandbox run, python",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_the_bar_of_its_runtime() {
        let bars = |runtime, action| {
            let limits = Subject::Ours(runtime, action).limits().into_iter();
            limits
                .map(|limit| (limit.percent, limit.baseline, limit.bar))
                .collect::<Vec<_>>()
        };
        let at_most = |bar| Some(Bar::AtMost(bar));
        use RuntimeKind::{Gvisor, Kata, Native};
        assert_eq!(
            bars(Native, Action::Create),
            [(50, Host::Bubblewrap, at_most(2.0))]
        );
        assert_eq!(
            bars(Gvisor, Action::Create),
            [(50, Host::RunscRun, at_most(1.2))]
        );
        assert_eq!(
            bars(Native, Action::Exec),
            [(50, Host::ForkExec, at_most(2.0))]
        );
        assert_eq!(
            bars(Gvisor, Action::Exec),
            [(50, Host::RunscExec, at_most(0.5))]
        );
        for runtime in [Native, Gvisor] {
            let both = [
                (50, Host::ForkExec, at_most(1.0)),
                (99, Host::ForkExec, at_most(5.0)),
            ];
            assert_eq!(bars(runtime, Action::Claim), both);
        }
        assert_eq!(
            bars(Native, Action::Cli),
            [(50, Host::ForkExec, at_most(10.0))]
        );
        assert_eq!(bars(Gvisor, Action::Cli), [(50, Host::ForkExec, None)]);
        assert_eq!(
            bars(Native, Action::Python),
            [(50, Host::Python, at_most(1.6))]
        );
        assert_eq!(bars(Gvisor, Action::Python), [(50, Host::Python, None)]);
        assert_eq!(bars(Kata, Action::Create), [(50, Host::RunscRun, None)]);
        assert!(Subject::Host(Host::ForkExec).limits().is_empty());
    }
}
