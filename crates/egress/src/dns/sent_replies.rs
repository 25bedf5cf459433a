//! Names and addresses of the DNS replies that were sent to one sandbox, so that its connections can
//! be checked against them.
//!
//! The sandbox decides how much it queries, so names and addresses are bounded and the oldest are
//! evicted. A connection to an evicted one costs a lookup.

use k8e_model::egress::HostName;
use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Names per sandbox. With [`ADDRESSES_MAX`] addresses each, half a megabyte at most.
const NAMES_MAX: usize = 512;

/// Addresses per name: those of one full reply.
const ADDRESSES_MAX: usize = 32;

/// Map from name to the addresses that were sent for it, with their expiry.
#[derive(Default)]
pub(crate) struct SentReplies {
    entries: Mutex<HashMap<HostName, Entry>>,
}

struct Entry {
    last: Instant,
    addresses: Vec<(Ipv4Addr, Instant)>,
}

// === impl SentReplies ===

impl SentReplies {
    /// Records a reply, before it is sent.
    pub(crate) fn record(&self, name: &HostName, addresses: &[Ipv4Addr], lifetime: Duration) {
        let now = Instant::now();
        let mut entries = self.entries();
        if !entries.contains_key(name) && entries.len() >= NAMES_MAX {
            make_room(&mut entries, now);
        }
        let entry = entries.entry(name.clone()).or_insert_with(|| Entry {
            last: now,
            addresses: Vec::new(),
        });
        entry.add(addresses, now, now + lifetime);
    }

    /// Whether this address was sent for the name and has not expired.
    pub(crate) fn contains(&self, name: &HostName, address: Ipv4Addr) -> bool {
        let now = Instant::now();
        self.entries()
            .get(name)
            .is_some_and(|entries| entries.contains(address, now))
    }

    /// All names for which this address was sent and has not expired.
    pub(crate) fn names_of(&self, address: Ipv4Addr) -> Vec<HostName> {
        let now = Instant::now();
        let entries = self.entries();
        let names = entries
            .iter()
            .filter(|(_, entries)| entries.contains(address, now));
        names.map(|(name, _)| name.clone()).collect()
    }

    pub(crate) fn clear(&self) {
        self.entries().clear();
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<HostName, Entry>> {
        // A panic while it was locked leaves a valid map.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Entry ===

impl Entry {
    fn add(&mut self, addresses: &[Ipv4Addr], now: Instant, end: Instant) {
        self.last = now;
        self.addresses.retain(|(_, end)| *end > now);
        for address in addresses.iter().take(ADDRESSES_MAX) {
            // Moved to the back even if known: the front is the least recently sent.
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

    fn contains(&self, address: Ipv4Addr, now: Instant) -> bool {
        let mut known = self.addresses.iter();
        known.any(|(known, end)| *known == address && *end > now)
    }
}

fn make_room(entries: &mut HashMap<HostName, Entry>, now: Instant) {
    entries.retain(|_, entries| entries.addresses.iter().any(|(_, end)| *end > now));
    while entries.len() >= NAMES_MAX {
        let oldest = entries.iter().min_by_key(|(_, entries)| entries.last);
        let Some(oldest) = oldest.map(|(name, _)| name.clone()) else {
            return;
        };
        entries.remove(&oldest);
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
    async fn a_reply_is_known_until_it_expires() {
        let replies = SentReplies::default();
        replies.record(&host(1), &[address(1), address(2)], MINUTE);
        replies.record(&host(2), &[address(1)], 2 * MINUTE);
        assert!(replies.contains(&host(1), address(2)) && !replies.contains(&host(2), address(2)));
        let mut names = replies.names_of(address(1));
        names.sort();
        assert_eq!(names, [host(1), host(2)]);
        tokio::time::advance(MINUTE).await;
        assert!(!replies.contains(&host(1), address(1)));
        assert_eq!(replies.names_of(address(1)), [host(2)]);
        replies.clear();
        assert!(replies.names_of(address(1)).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_repeated_reply_extends_the_lifetime_and_never_shortens_it() {
        let replies = SentReplies::default();
        replies.record(&host(1), &[address(1)], 3 * MINUTE);
        replies.record(&host(1), &[address(1)], MINUTE);
        tokio::time::advance(2 * MINUTE).await;
        assert!(replies.contains(&host(1), address(1)));
        // A reply with other addresses adds to the one before: a client may still use either.
        replies.record(&host(1), &[address(2)], MINUTE);
        assert!(replies.contains(&host(1), address(1)) && replies.contains(&host(1), address(2)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_name_is_evicted() {
        let replies = SentReplies::default();
        let names_max = u32::try_from(NAMES_MAX).unwrap();
        for number in 0..names_max + 10 {
            replies.record(&host(number), &[address(number)], MINUTE);
            // The first name is queried again and again, so it stays.
            replies.record(&host(0), &[address(0)], MINUTE);
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(replies.entries().len(), NAMES_MAX);
        assert!(replies.contains(&host(0), address(0)));
        assert!(!replies.contains(&host(1), address(1)));
        assert!(replies.contains(&host(names_max), address(names_max)));
    }

    #[test]
    fn the_oldest_address_is_evicted() {
        let replies = SentReplies::default();
        for number in 0..100 {
            replies.record(&host(1), &[address(number)], MINUTE);
        }
        assert!(
            !replies.contains(&host(1), address(67)) && replies.contains(&host(1), address(68))
        );
        let many: Vec<Ipv4Addr> = (200..700).map(address).collect();
        replies.record(&host(1), &many, MINUTE);
        assert_eq!(replies.entries()[&host(1)].addresses.len(), ADDRESSES_MAX);
        assert!(replies.contains(&host(1), address(200)));
    }

    proptest! {
        #[test]
        fn names_and_addresses_stay_within_their_bounds(
            tells in prop::collection::vec((0_u32..2000, 0_u32..2000, 1_u32..40), 0..200)
        ) {
            let replies = SentReplies::default();
            for (name, first, count) in tells {
                let some: Vec<Ipv4Addr> = (first..first + count).map(address).collect();
                replies.record(&host(name), &some, MINUTE);
                prop_assert!(replies.contains(&host(name), some[0]));
            }
            let entries = replies.entries();
            prop_assert!(entries.len() <= NAMES_MAX);
            prop_assert!(entries.values().all(|entries| entries.addresses.len() <= ADDRESSES_MAX));
        }
    }
}
