//! Warm pool sizing: how many sandboxes to keep ready, from recent demand.
//!
//! A pool keeps about as many ready as were claimed lately, between `min` and `max`, so that a
//! burst like the last one finds them. What was claimed counts less the longer ago it was; a pool
//! that nobody uses shrinks back to `min`.

use crate::Error;
use std::time::Duration;

/// More than this is a machine's worth of sandboxes that nobody asked for.
pub const POOL_MAX: usize = 1024;

/// After this time a claim counts half.
const HALF_LIFE: Duration = Duration::from_secs(30);

/// What is left of a claim when it counts as nothing: else a pool with `min` 0 would never be empty.
const NOTHING: f64 = 0.05;

/// Above what would be started before anything is stopped, so that a steady trickle of claims does
/// not make sandboxes come and go between two of them.
const SLACK: f64 = 1.5;

/// What one idle sandbox may cost: gVisor needs 12 MiB, native less than one.
const SANDBOX_BYTES: u64 = 16 * 1024 * 1024;

/// Left to everybody else: below it sandboxes in use are about to be killed for memory.
const RESERVE_BYTES: u64 = 256 * 1024 * 1024;

/// Launches at once: each keeps a CPU busy, and past a few they only wait for the kernel's locks.
const LAUNCHES_MAX: usize = 4;

/// Between which sizes a pool moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSize {
    min: usize,
    max: usize,
}

/// How many were claimed lately, those of long ago counting less.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct PoolDemand(f64);

/// What a machine has to spare. None is not known, and bounds nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spare {
    /// Memory that can be had without swapping.
    pub memory_bytes: Option<u64>,
    /// Thousandths of a CPU that do nothing.
    pub cpu_millis: Option<u32>,
}

/// A pool right now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PoolState {
    /// To be claimed.
    pub ready: usize,
    /// Being launched.
    pub pending: usize,
    /// Claimed lately.
    pub demand: PoolDemand,
    /// What the machine has to spare.
    pub spare: Spare,
}

/// What to do now. Never both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolPlan {
    /// This many are launched.
    pub start: usize,
    /// This many ready ones are destroyed.
    pub stop: usize,
}

// === impl PoolSize ===

impl PoolSize {
    /// No pool at all.
    pub const OFF: Self = Self { min: 0, max: 0 };

    /// A `max` of 0 turns a pool off.
    pub fn new(min: usize, max: usize) -> Result<Self, Error> {
        if min > max {
            return Err(Error::invalid(format!(
                "a pool of at least {min} and at most {max} cannot be: raise --pool-max or lower --pool-min"
            )));
        }
        if max > POOL_MAX {
            return Err(Error::invalid(format!(
                "a pool of {max} is too large: use at most {POOL_MAX}"
            )));
        }
        Ok(Self { min, max })
    }

    /// The fewest it keeps ready.
    pub fn min(&self) -> usize {
        self.min
    }

    /// The most it ever has.
    pub fn max(&self) -> usize {
        self.max
    }

    /// Whether there is none.
    pub fn is_off(&self) -> bool {
        self.max == 0
    }

    /// How many it wants to have ready.
    pub fn target(&self, demand: PoolDemand) -> usize {
        self.within(demand.0)
    }

    /// A claim now; demand beyond `max` is cut, so that it fades as soon as claims stop.
    #[must_use]
    pub fn claimed(&self, demand: PoolDemand) -> PoolDemand {
        PoolDemand((demand.0 + 1.0).min(count(self.max)))
    }

    /// What to do now.
    pub fn plan(&self, state: &PoolState) -> PoolPlan {
        let have = state.ready + state.pending;
        let (want, keep) = (
            self.target(state.demand),
            self.within(state.demand.0 * SLACK),
        );
        PoolPlan {
            start: want
                .saturating_sub(have)
                .min(state.spare.launches().saturating_sub(state.pending))
                .min(state.spare.sandboxes().saturating_sub(state.pending)),
            stop: have.saturating_sub(keep).min(state.ready),
        }
    }

    fn within(&self, wanted: f64) -> usize {
        // Counted up: no float has to become an integer.
        let above = |n: &usize| count(*n) >= wanted;
        let least = (self.min..=self.max).find(above);
        least.unwrap_or(self.max)
    }
}

// === impl PoolDemand ===

impl PoolDemand {
    /// What is left of it after a time without claims.
    #[must_use]
    pub fn after(self, time: Duration) -> Self {
        let halves = time.as_secs_f64() / HALF_LIFE.as_secs_f64();
        let left = self.0 * 0.5_f64.powf(halves);
        Self(if left < NOTHING { 0.0 } else { left })
    }
}

// === impl Spare ===

impl Spare {
    /// How many may be launching at once. One always may: a machine is busy when pools are needed most.
    fn launches(&self) -> usize {
        let cpus = self.cpu_millis.map_or(LAUNCHES_MAX, |millis| {
            usize::try_from(millis / 1000).unwrap_or(LAUNCHES_MAX)
        });
        cpus.clamp(1, LAUNCHES_MAX)
    }

    /// How many more fit into memory.
    fn sandboxes(&self) -> usize {
        self.memory_bytes.map_or(usize::MAX, |bytes| {
            let room = bytes.saturating_sub(RESERVE_BYTES) / SANDBOX_BYTES;
            usize::try_from(room).unwrap_or(usize::MAX)
        })
    }
}

fn count(n: usize) -> f64 {
    // POOL_MAX is far below where a float cannot count.
    f64::from(u32::try_from(n).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1024 * 1024;

    fn size(min: usize, max: usize) -> PoolSize {
        PoolSize::new(min, max).unwrap()
    }

    fn claims(size: PoolSize, claims: usize) -> PoolDemand {
        (0..claims).fold(PoolDemand::default(), |demand, _| size.claimed(demand))
    }

    fn sizes() -> impl Strategy<Value = PoolSize> {
        (0..40usize, 0..40usize).prop_map(|(a, b)| size(a.min(b), a.max(b)))
    }

    fn spares() -> impl Strategy<Value = Spare> {
        (
            proptest::option::of(0..2048 * MIB),
            proptest::option::of(0..9000u32),
        )
            .prop_map(|(memory_bytes, cpu_millis)| Spare {
                memory_bytes,
                cpu_millis,
            })
    }

    proptest! {
        #[test]
        fn a_plan_keeps_within_every_bound(
            size in sizes(), ready in 0..60usize, pending in 0..8usize, claimed in 0..100usize, age in 0..600u64, spare in spares(),
        ) {
            let demand = claims(size, claimed).after(Duration::from_secs(age));
            let state = PoolState { ready, pending, demand, spare };
            let plan = size.plan(&state);
            prop_assert!(plan.start == 0 || plan.stop == 0);
            prop_assert!(plan.stop <= ready);
            prop_assert!(plan.start == 0 || ready + pending + plan.start <= size.max());
            prop_assert!(plan.start == 0 || pending + plan.start <= LAUNCHES_MAX);
            if let Some(bytes) = spare.memory_bytes && plan.start > 0 {
                prop_assert!((plan.start as u64) * SANDBOX_BYTES + RESERVE_BYTES <= bytes);
            }
            // What it stops leaves at least the minimum.
            prop_assert!(plan.stop == 0 || ready + pending - plan.stop >= size.min());
            prop_assert!((size.min()..=size.max()).contains(&size.target(demand)));
        }

        #[test]
        fn demand_never_wants_fewer(size in sizes(), a in 0..100usize, b in 0..100usize) {
            let (few, many) = (claims(size, a.min(b)), claims(size, a.max(b)));
            prop_assert!(size.target(few) <= size.target(many));
        }

        #[test]
        fn plans_carried_out_come_to_rest(size in sizes(), ready in 0..60usize, claimed in 0..100usize) {
            let demand = claims(size, claimed);
            let mut state = PoolState { ready, demand, ..PoolState::default() };
            for _ in 0..100 {
                let plan = size.plan(&state);
                state.ready = state.ready + plan.start - plan.stop;
            }
            prop_assert_eq!(size.plan(&state), PoolPlan::default());
            prop_assert!(state.ready >= size.target(demand));
            // Nobody claims any more: after a while only the minimum is left.
            state.demand = demand.after(Duration::from_secs(600));
            state.ready -= size.plan(&state).stop;
            prop_assert_eq!(state.ready, size.min());
        }

        #[test]
        fn demand_fades_the_same_in_many_steps_or_one(claimed in 0..50usize, steps in 1..20u32) {
            let demand = claims(size(0, 100), claimed);
            let step = Duration::from_millis(1500);
            let many = (0..steps).fold(demand, |demand, _| demand.after(step));
            let one = demand.after(step * steps);
            prop_assert!((many.0 - one.0).abs() < 0.06, "{many:?} {one:?}");
        }
    }

    #[test]
    fn a_pool_follows_its_claims() {
        let size = size(2, 16);
        let target = |demand| size.target(demand);
        assert_eq!(target(PoolDemand::default()), 2);
        assert_eq!(target(claims(size, 5)), 5);
        assert_eq!(target(claims(size, 500)), 16);
        assert_eq!(target(claims(size, 500).after(HALF_LIFE)), 8);
        assert_eq!(target(claims(size, 500).after(HALF_LIFE * 20)), 2);
    }

    #[test]
    fn a_busy_machine_launches_one_at_a_time_and_a_full_one_none() {
        let plan = |ready, memory_bytes, cpu_millis| {
            size(8, 8)
                .plan(&PoolState {
                    ready,
                    spare: Spare {
                        memory_bytes,
                        cpu_millis,
                    },
                    ..PoolState::default()
                })
                .start
        };
        assert_eq!(plan(0, None, None), 4);
        assert_eq!(plan(0, None, Some(0)), 1);
        assert_eq!(plan(0, None, Some(2500)), 2);
        assert_eq!(plan(6, None, Some(64_000)), 2);
        assert_eq!(plan(0, Some(200 * MIB), None), 0);
        assert_eq!(plan(0, Some(300 * MIB), None), 2);
    }

    #[test]
    fn sizes_are_checked() {
        assert!(PoolSize::new(3, 2).is_err());
        assert!(PoolSize::new(0, POOL_MAX + 1).is_err());
        assert!(size(0, 0).is_off());
        assert_eq!(PoolSize::OFF, size(0, 0));
    }
}
