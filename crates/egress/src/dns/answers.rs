//! What one sandbox was told of names, so that a connection can be checked against it.
//!
//! The sandbox decides how much is asked, so all of it is bounded; what was told first is forgotten
//! first. What is forgotten is asked again, and costs a lookup.

use k8e_model::egress::HostName;
use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Names that one sandbox has addresses of. With [`ADDRESSES_MAX`], half a megabyte at the worst.
const NAMES_MAX: usize = 512;

/// Addresses of one name: those of a full answer, however the answers change.
const ADDRESSES_MAX: usize = 32;

/// Names and the addresses that the sandbox was told they have.
#[derive(Default)]
pub(crate) struct Answers {
    told: Mutex<HashMap<HostName, Told>>,
}

struct Told {
    last: Instant,
    addresses: Vec<(Ipv4Addr, Instant)>,
}

// === impl Answers ===

impl Answers {
    /// The sandbox is about to be told that the name has these addresses.
    pub(crate) fn tell(&self, name: &HostName, addresses: &[Ipv4Addr], lifetime: Duration) {
        let now = Instant::now();
        let mut told = self.told();
        if !told.contains_key(name) && told.len() >= NAMES_MAX {
            make_room(&mut told, now);
        }
        let entry = told.entry(name.clone()).or_insert_with(|| Told {
            last: now,
            addresses: Vec::new(),
        });
        entry.add(addresses, now, now + lifetime);
    }

    /// Whether it was told that the name has this address.
    pub(crate) fn has(&self, name: &HostName, address: Ipv4Addr) -> bool {
        let now = Instant::now();
        self.told()
            .get(name)
            .is_some_and(|told| told.has(address, now))
    }

    /// All names that it was told have this address.
    pub(crate) fn names_of(&self, address: Ipv4Addr) -> Vec<HostName> {
        let now = Instant::now();
        let told = self.told();
        let names = told.iter().filter(|(_, told)| told.has(address, now));
        names.map(|(name, _)| name.clone()).collect()
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        self.told().clear();
    }

    fn told(&self) -> MutexGuard<'_, HashMap<HostName, Told>> {
        // A panic in between leaves a map that is still a map.
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Told ===

impl Told {
    fn add(&mut self, addresses: &[Ipv4Addr], now: Instant, end: Instant) {
        self.last = now;
        self.addresses.retain(|(_, end)| *end > now);
        for address in addresses.iter().take(ADDRESSES_MAX) {
            // To the back, also what is there already: the front is what was told first.
            let mut end = end;
            if let Some(at) = self
                .addresses
                .iter()
                .position(|(known, _)| known == address)
            {
                end = end.max(self.addresses.remove(at).1);
            }
            self.addresses.push((*address, end));
        }
        let over = self.addresses.len().saturating_sub(ADDRESSES_MAX);
        self.addresses.drain(..over);
    }

    fn has(&self, address: Ipv4Addr, now: Instant) -> bool {
        let mut known = self.addresses.iter();
        known.any(|(known, end)| *known == address && *end > now)
    }
}

fn make_room(told: &mut HashMap<HostName, Told>, now: Instant) {
    told.retain(|_, told| told.addresses.iter().any(|(_, end)| *end > now));
    while told.len() >= NAMES_MAX {
        let oldest = told.iter().min_by_key(|(_, told)| told.last);
        let Some(oldest) = oldest.map(|(name, _)| name.clone()) else {
            return;
        };
        told.remove(&oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn host(number: u32) -> HostName {
        HostName::parse(&format!("h{number}.example")).unwrap()
    }

    fn address(number: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(0x0808_0000 + number)
    }

    #[tokio::test(start_paused = true)]
    async fn told_is_known_until_it_is_over() {
        let answers = Answers::default();
        answers.tell(&host(1), &[address(1), address(2)], MINUTE);
        answers.tell(&host(2), &[address(1)], 2 * MINUTE);
        assert!(answers.has(&host(1), address(2)) && !answers.has(&host(2), address(2)));
        let mut names = answers.names_of(address(1));
        names.sort();
        assert_eq!(names, [host(1), host(2)]);
        tokio::time::advance(MINUTE).await;
        assert!(!answers.has(&host(1), address(1)));
        assert_eq!(answers.names_of(address(1)), [host(2)]);
        answers.clear();
        assert!(answers.names_of(address(1)).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn told_again_lives_on_and_never_shorter() {
        let answers = Answers::default();
        answers.tell(&host(1), &[address(1)], 3 * MINUTE);
        answers.tell(&host(1), &[address(1)], MINUTE);
        tokio::time::advance(2 * MINUTE).await;
        assert!(answers.has(&host(1), address(1)));
        // An answer that changes adds to the one before: a client may still use either.
        answers.tell(&host(1), &[address(2)], MINUTE);
        assert!(answers.has(&host(1), address(1)) && answers.has(&host(1), address(2)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_name_is_forgotten() {
        let answers = Answers::default();
        let names_max = u32::try_from(NAMES_MAX).unwrap();
        for number in 0..names_max + 10 {
            answers.tell(&host(number), &[address(number)], MINUTE);
            // The first is in use, so it stays.
            answers.tell(&host(0), &[address(0)], MINUTE);
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(answers.told().len(), NAMES_MAX);
        assert!(answers.has(&host(0), address(0)));
        assert!(!answers.has(&host(1), address(1)));
        assert!(answers.has(&host(names_max), address(names_max)));
    }

    #[test]
    fn the_oldest_address_is_forgotten() {
        let answers = Answers::default();
        for number in 0..100 {
            answers.tell(&host(1), &[address(number)], MINUTE);
        }
        assert!(!answers.has(&host(1), address(67)) && answers.has(&host(1), address(68)));
        let many: Vec<Ipv4Addr> = (200..700).map(address).collect();
        answers.tell(&host(1), &many, MINUTE);
        assert_eq!(answers.told()[&host(1)].addresses.len(), ADDRESSES_MAX);
        assert!(answers.has(&host(1), address(200)));
    }

    proptest! {
        #[test]
        fn it_never_outgrows_its_bounds(
            tells in prop::collection::vec((0_u32..2000, 0_u32..2000, 1_u32..40), 0..200)
        ) {
            let answers = Answers::default();
            for (name, first, count) in tells {
                let some: Vec<Ipv4Addr> = (first..first + count).map(address).collect();
                answers.tell(&host(name), &some, MINUTE);
                prop_assert!(answers.has(&host(name), some[0]));
            }
            let told = answers.told();
            prop_assert!(told.len() <= NAMES_MAX);
            prop_assert!(told.values().all(|told| told.addresses.len() <= ADDRESSES_MAX));
        }
    }
}
