//! The plan of a pool, as a pure function of its sandboxes: how many to create, which to delete, when to look again.

use crate::crd::UpdateStrategyType;
use std::time::Duration;

/// A sandbox of the pool, reduced to what the plan needs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Member {
    pub(super) name: String,
    /// Its condition `Ready` is true: it can be bound to a claim.
    pub(super) ready: bool,
    /// It has a deletion timestamp.
    pub(super) deleting: bool,
    /// Its pod has finished, so it will never be ready again.
    pub(super) finished: bool,
    /// It was created from an older version of the template.
    pub(super) stale: bool,
    /// No node takes its pod, so a replacement would not help.
    pub(super) unschedulable: bool,
    /// Time since its creation.
    pub(super) age: Duration,
    /// Time since it was last ready, or since its creation.
    pub(super) unready: Duration,
}

/// Desired state of the pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// Number of unclaimed sandboxes.
    pub(super) replicas: usize,
    /// Whether stale sandboxes are deleted.
    pub(super) strategy: UpdateStrategyType,
    /// Readiness grace period: a sandbox that is not ready for this long is replaced.
    pub(super) grace: Duration,
    /// Recheck interval while a sandbox is unschedulable.
    pub(super) recheck: Duration,
    /// Largest number of sandboxes to create in one reconcile.
    pub(super) batch: usize,
}

/// The changes that bring the pool to its desired state.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Plan {
    /// Number of sandboxes to create.
    pub(super) create: usize,
    /// Names of the sandboxes to delete.
    pub(super) delete: Vec<String>,
    /// A sandbox exceeded its grace period because no node takes its pod.
    pub(super) unschedulable: bool,
    /// When to reconcile again although nothing changed.
    pub(super) recheck: Option<Duration>,
    /// Number of sandboxes after the deletions, without those to create.
    pub(super) replicas: usize,
    /// Number of these that are ready.
    pub(super) ready: usize,
}

/// Plans the changes for a pool with these members.
pub(super) fn plan(wanted: &Wanted, members: &[Member]) -> Plan {
    let mut plan = Plan::default();
    let terminating = members.iter().filter(|m| m.deleting).count();
    let mut kept: Vec<&Member> = Vec::new();
    for member in members.iter().filter(|m| !m.deleting) {
        if is_lost(wanted, member) {
            plan.delete.push(member.name.clone());
            continue;
        }
        if !member.ready {
            plan.recheck_member(wanted, member);
        }
        kept.push(member);
    }
    // Surplus sandboxes: those that are not ready first, then the newest.
    kept.sort_by_key(|m| std::cmp::Reverse((m.ready, m.age, m.name.clone())));
    let surplus = kept.split_off(kept.len().min(wanted.replicas));
    plan.delete.extend(surplus.iter().map(|m| m.name.clone()));
    plan.replicas = kept.len();
    plan.ready = kept.iter().filter(|m| m.ready).count();
    let present = kept.len() + terminating + plan.delete.len();
    plan.create = wanted.replicas.saturating_sub(present).min(wanted.batch);
    plan
}

/// Whether a member must be replaced.
fn is_lost(wanted: &Wanted, member: &Member) -> bool {
    let outdated = member.stale && wanted.strategy == UpdateStrategyType::Recreate;
    let late = !member.ready && !member.unschedulable && member.unready >= wanted.grace;
    outdated || late || member.finished
}

// === impl Plan ===

impl Plan {
    /// Schedules a recheck for the end of a member's grace period.
    fn recheck_member(&mut self, wanted: &Wanted, member: &Member) {
        let due = if member.unready < wanted.grace {
            wanted.grace - member.unready
        } else {
            self.unschedulable = true;
            wanted.recheck
        };
        self.recheck = Some(self.recheck.map_or(due, |sooner| sooner.min(due)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GRACE: Duration = Duration::from_secs(300);

    fn wanted(replicas: usize) -> Wanted {
        Wanted {
            replicas,
            strategy: UpdateStrategyType::OnReplenish,
            grace: GRACE,
            recheck: Duration::from_secs(60),
            batch: 300,
        }
    }

    fn member(name: &str, ready: bool, age: u64) -> Member {
        Member {
            name: name.to_owned(),
            ready,
            deleting: false,
            finished: false,
            stale: false,
            unschedulable: false,
            age: Duration::from_secs(age),
            unready: if ready {
                Duration::ZERO
            } else {
                Duration::from_secs(age)
            },
        }
    }

    #[test]
    fn an_empty_pool_is_filled_in_batches() {
        assert_eq!(plan(&wanted(3), &[]).create, 3);
        assert_eq!(plan(&wanted(1000), &[]).create, 300);
    }

    #[test]
    fn surplus_is_deleted_unready_first_then_the_newest() {
        let members = [
            member("old", true, 30),
            member("new", true, 10),
            member("starting", false, 20),
        ];
        assert_eq!(plan(&wanted(2), &members).delete, ["starting"]);
        let delete = plan(&wanted(1), &members).delete;
        assert_eq!(delete.len(), 2);
        assert!(!delete.contains(&"old".to_owned()));
    }

    #[test]
    fn stale_sandboxes_are_deleted_only_with_recreate() {
        let stale = Member {
            stale: true,
            ..member("a", true, 5)
        };
        assert!(
            plan(&wanted(1), std::slice::from_ref(&stale))
                .delete
                .is_empty()
        );
        let recreate = Wanted {
            strategy: UpdateStrategyType::Recreate,
            ..wanted(1)
        };
        let plan = plan(&recreate, &[stale]);
        assert_eq!(plan.delete, ["a"]);
        assert_eq!(
            plan.create, 0,
            "its replacement is created after the deletion"
        );
    }

    #[test]
    fn a_sandbox_past_its_grace_period_is_deleted_unless_unschedulable() {
        let late = member("late", false, 301);
        assert_eq!(
            plan(&wanted(1), std::slice::from_ref(&late)).delete,
            ["late"]
        );
        let unschedulable = Member {
            unschedulable: true,
            ..late
        };
        let plan = plan(&wanted(1), &[unschedulable]);
        assert!(plan.delete.is_empty() && plan.unschedulable);
        assert_eq!(plan.recheck, Some(Duration::from_secs(60)));
    }

    #[test]
    fn an_old_sandbox_that_is_briefly_unready_is_kept() {
        let blinking = Member {
            unready: Duration::from_secs(1),
            ..member("old", false, 4000)
        };
        assert!(plan(&wanted(1), &[blinking]).delete.is_empty());
    }

    #[test]
    fn a_starting_sandbox_is_rechecked_at_the_end_of_its_grace_period() {
        let plan = plan(
            &wanted(2),
            &[member("a", false, 100), member("b", false, 250)],
        );
        assert_eq!(plan.recheck, Some(Duration::from_secs(50)));
    }

    prop_compose! {
        fn any_member(name: usize)(
            ready: bool, deleting: bool, finished: bool, stale: bool, unschedulable: bool, age in 0u64..600,
        ) -> Member {
            Member { deleting, finished, stale, unschedulable, ..member(&format!("m{name}"), ready, age) }
        }
    }

    fn any_members() -> impl Strategy<Value = Vec<Member>> {
        proptest::collection::vec(any::<proptest::sample::Index>(), 0..40)
            .prop_flat_map(|v| (0..v.len()).map(any_member).collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn a_plan_never_exceeds_the_replicas_and_converges(
            replicas in 0usize..30, recreate: bool, members in any_members(),
        ) {
            let strategy = if recreate { UpdateStrategyType::Recreate } else { UpdateStrategyType::OnReplenish };
            let wanted = Wanted { strategy, ..wanted(replicas) };
            let plan = plan(&wanted, &members);
            let alive: Vec<_> = members.iter().filter(|m| !m.deleting).collect();
            prop_assert!(plan.delete.iter().all(|name| alive.iter().any(|m| &m.name == name)));
            prop_assert_eq!(plan.replicas, alive.len() - plan.delete.len());
            prop_assert!(plan.replicas + plan.create <= replicas);
            if members.iter().all(|m| !m.deleting) && plan.delete.is_empty() {
                prop_assert_eq!(plan.replicas + plan.create, replicas);
            }
        }

        /// Repeated plans end with exactly the desired number of sandboxes.
        #[test]
        fn repeated_plans_reach_the_replicas(replicas in 0usize..30, members in any_members()) {
            let wanted = wanted(replicas);
            let mut members = members;
            for round in 0..6 {
                let plan = plan(&wanted, &members);
                members.retain(|m| !m.deleting && !plan.delete.contains(&m.name));
                members.extend((0..plan.create).map(|n| member(&format!("r{round}-{n}"), true, 0)));
            }
            prop_assert_eq!(members.len(), replicas);
        }
    }
}
