//! What a pool needs now: a function of what is there, tested without a cluster.

use crate::crd::UpdateStrategyType;
use std::time::Duration;

/// A sandbox of the pool, as far as the plan cares.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Member {
    /// Its name.
    pub(super) name: String,
    /// It can be handed out.
    pub(super) ready: bool,
    /// It is being deleted.
    pub(super) deleting: bool,
    /// Its pod ended by itself: it will never be ready again.
    pub(super) finished: bool,
    /// It was made from what the template no longer says.
    pub(super) stale: bool,
    /// No node takes its pod: making another would not help.
    pub(super) held_up: bool,
    /// How long ago it was made.
    pub(super) age: Duration,
    /// How long it has not been ready.
    pub(super) unready: Duration,
}

/// What the pool is to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// How many sandboxes are to wait.
    pub(super) replicas: usize,
    /// What happens to stale ones.
    pub(super) strategy: UpdateStrategyType,
    /// How long a sandbox may take to become ready.
    pub(super) grace: Duration,
    /// How soon a sandbox that no node takes is looked at again.
    pub(super) recheck: Duration,
    /// How many may be made in one pass.
    pub(super) batch: usize,
}

/// What to do about it.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Plan {
    /// How many sandboxes to make.
    pub(super) create: usize,
    /// Which to delete.
    pub(super) delete: Vec<String>,
    /// Some sandbox is beyond its time because no node takes it.
    pub(super) held_up: bool,
    /// When to look again although nothing changed.
    pub(super) recheck: Option<Duration>,
    /// Sandboxes that are in the pool after this plan, without those to be made.
    pub(super) replicas: usize,
    /// Those of them that are ready.
    pub(super) ready: usize,
}

/// What to do for a pool with these members.
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
            plan.watch_over(wanted, member);
        }
        kept.push(member);
    }
    // Unready ones go first, then the newest.
    kept.sort_by_key(|m| std::cmp::Reverse((m.ready, m.age, m.name.clone())));
    let surplus = kept.split_off(kept.len().min(wanted.replicas));
    plan.delete.extend(surplus.iter().map(|m| m.name.clone()));
    plan.replicas = kept.len();
    plan.ready = kept.iter().filter(|m| m.ready).count();
    let present = kept.len() + terminating + plan.delete.len();
    plan.create = wanted.replicas.saturating_sub(present).min(wanted.batch);
    plan
}

/// Whether a member is of no use any more.
fn is_lost(wanted: &Wanted, member: &Member) -> bool {
    let outdated = member.stale && wanted.strategy == UpdateStrategyType::Recreate;
    let late = !member.ready && !member.held_up && member.unready >= wanted.grace;
    outdated || late || member.finished
}

// === impl Plan ===

impl Plan {
    /// Comes back when a member that is not ready is due.
    fn watch_over(&mut self, wanted: &Wanted, member: &Member) {
        let due = if member.unready < wanted.grace {
            wanted.grace - member.unready
        } else {
            self.held_up = true;
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
            held_up: false,
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
    fn unready_ones_go_first_then_the_newest() {
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
    fn stale_ones_go_only_when_asked() {
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
        assert_eq!(plan.create, 0, "its place is free when it is gone");
    }

    #[test]
    fn a_late_one_goes_unless_no_node_takes_it() {
        let late = member("late", false, 301);
        assert_eq!(
            plan(&wanted(1), std::slice::from_ref(&late)).delete,
            ["late"]
        );
        let held = Member {
            held_up: true,
            ..late
        };
        let plan = plan(&wanted(1), &[held]);
        assert!(plan.delete.is_empty() && plan.held_up);
        assert_eq!(plan.recheck, Some(Duration::from_secs(60)));
    }

    #[test]
    fn an_old_one_that_blinks_stays() {
        let blinking = Member {
            unready: Duration::from_secs(1),
            ..member("old", false, 4000)
        };
        assert!(plan(&wanted(1), &[blinking]).delete.is_empty());
    }

    #[test]
    fn one_that_starts_is_looked_at_when_its_time_is_up() {
        let plan = plan(
            &wanted(2),
            &[member("a", false, 100), member("b", false, 250)],
        );
        assert_eq!(plan.recheck, Some(Duration::from_secs(50)));
    }

    prop_compose! {
        fn any_member(name: usize)(
            ready: bool, deleting: bool, finished: bool, stale: bool, held_up: bool, age in 0u64..600,
        ) -> Member {
            Member { deleting, finished, stale, held_up, ..member(&format!("m{name}"), ready, age) }
        }
    }

    fn any_members() -> impl Strategy<Value = Vec<Member>> {
        proptest::collection::vec(any::<proptest::sample::Index>(), 0..40)
            .prop_flat_map(|v| (0..v.len()).map(any_member).collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn never_more_than_wanted_and_always_towards_it(
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

        /// Passes over what the last one left end, with exactly the wanted number.
        #[test]
        fn it_converges(replicas in 0usize..30, members in any_members()) {
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
