//! Property tests of the index against a model of the API server, with events that are late, lost, duplicated and
//! reordered.

use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

const POOL: &str = "pool";

/// A sandbox in the model of the API server.
#[derive(Clone, Debug)]
struct Record {
    version: u64,
    claim: Option<usize>,
}

/// Model of the API server with optimistic concurrency: a write succeeds only for the current version.
#[derive(Default)]
struct Server {
    clock: u64,
    sandboxes: BTreeMap<Key, Record>,
    /// Every owner that a sandbox ever had.
    owners: BTreeMap<Key, Vec<usize>>,
    events: VecDeque<Key>,
}

/// One controller: its view of the server and its index.
#[derive(Default)]
struct Controller {
    view: BTreeMap<Key, Record>,
    index: Candidates,
    /// Sandboxes that were bound, by claim: a claim is reconciled by one worker at a time.
    bound: BTreeMap<usize, Key>,
}

fn key(number: usize) -> Key {
    Key::new("ns", format!("s{number}"))
}

impl Server {
    fn make(&mut self, number: usize) {
        self.clock += 1;
        self.sandboxes.insert(
            key(number),
            Record {
                version: self.clock,
                claim: None,
            },
        );
        self.events.push_back(key(number));
    }

    /// Another writer changes the object: its version increases.
    fn touch(&mut self, key: &Key) {
        self.clock += 1;
        if let Some(record) = self.sandboxes.get_mut(key) {
            record.version = self.clock;
            self.events.push_back(key.clone());
        }
    }

    fn adopt(&mut self, key: &Key, version: u64, claim: usize) -> Result<Record, Option<Record>> {
        self.clock += 1;
        let clock = self.clock;
        match self.sandboxes.get_mut(key) {
            None => Err(None),
            Some(record) if record.version != version => Err(Some(record.clone())),
            Some(record) => {
                *record = Record {
                    version: clock,
                    claim: Some(claim),
                };
                self.owners.entry(key.clone()).or_default().push(claim);
                self.events.push_back(key.clone());
                Ok(record.clone())
            }
        }
    }

    /// The sandbox that a claim owns, as a restarted controller finds it.
    fn owned_by(&self, claim: usize) -> Option<Key> {
        self.sandboxes
            .iter()
            .find(|(_, r)| r.claim == Some(claim))
            .map(|(key, _)| key.clone())
    }
}

impl Controller {
    /// Applies the current version of a sandbox; an older version is ignored.
    fn see(&mut self, key: &Key, record: Option<&Record>) {
        match record {
            Some(record)
                if self
                    .view
                    .get(key)
                    .is_some_and(|known| known.version >= record.version) => {}
            Some(record) => {
                self.view.insert(key.clone(), record.clone());
                match record.claim {
                    None => self.index.offer(candidate(key)),
                    Some(_) => self.index.withdraw(key),
                }
            }
            None => {
                self.view.remove(key);
                self.index.withdraw(key);
            }
        }
    }

    fn list(&mut self, server: &Server) {
        for key in self.view.keys().cloned().collect::<Vec<_>>() {
            if !server.sandboxes.contains_key(&key) {
                self.see(&key, None);
            }
        }
        for (key, record) in &server.sandboxes {
            self.see(key, Some(record));
        }
    }

    /// Reconciles a claim without a sandbox.
    fn serve(&mut self, server: &mut Server, claim: usize) {
        if self.bound.contains_key(&claim) {
            return;
        }
        if let Some(key) = self
            .view
            .iter()
            .find(|(_, r)| r.claim == Some(claim))
            .map(|(k, _)| k.clone())
        {
            self.bound.insert(claim, key);
            return;
        }
        let Some(candidate) = self.index.take(|_| true) else {
            return;
        };
        let version = self.view[&candidate.key].version;
        match server.adopt(&candidate.key, version, claim) {
            Ok(record) => {
                self.see(&candidate.key, Some(&record));
                self.bound.insert(claim, candidate.key.clone());
            }
            Err(now) => self.see(&candidate.key, now.as_ref()),
        }
        self.index.give_back(&candidate.key);
    }
}

fn candidate(key: &Key) -> Candidate {
    Candidate {
        key: key.clone(),
        pool: POOL.to_owned(),
        created: 0,
        ready: true,
        node: None,
        template_hash: None,
    }
}

#[derive(Clone, Debug)]
enum Step {
    Make,
    Touch(usize),
    Delete(usize),
    Deliver,
    Lose,
    Double,
    Reorder,
    Claim(usize),
    List,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Make),
        1 => (0..40usize).prop_map(Step::Touch),
        1 => (0..40usize).prop_map(Step::Delete),
        6 => Just(Step::Deliver),
        1 => Just(Step::Lose),
        1 => Just(Step::Double),
        1 => Just(Step::Reorder),
        6 => (0..20usize).prop_map(Step::Claim),
        1 => Just(Step::List),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #[test]
    fn no_sandbox_ever_has_two_claims(steps in proptest::collection::vec(step(), 0..400)) {
        let (mut server, mut controller, mut made) = (Server::default(), Controller::default(), 0);
        for step in steps {
            match step {
                Step::Make => {
                    server.make(made);
                    made += 1;
                }
                Step::Touch(number) => server.touch(&key(number)),
                Step::Delete(number) => {
                    let key = key(number);
                    if server.sandboxes.get(&key).is_some_and(|r| r.claim.is_none()) {
                        server.sandboxes.remove(&key);
                        server.events.push_back(key);
                    }
                }
                Step::Deliver => {
                    if let Some(key) = server.events.pop_front() {
                        let record = server.sandboxes.get(&key).cloned();
                        controller.see(&key, record.as_ref());
                    }
                }
                Step::Lose => drop(server.events.pop_front()),
                Step::Double => {
                    let first = server.events.front().cloned();
                    server.events.extend(first);
                }
                Step::Reorder => server.events.rotate_left(usize::from(server.events.len() > 1)),
                Step::Claim(claim) => controller.serve(&mut server, claim),
                Step::List => controller.list(&server),
                Step::Restart => {
                    controller = Controller::default();
                    controller.list(&server);
                }
            }
            for (sandbox, owners) in &server.owners {
                prop_assert_eq!(owners.len(), 1, "{} was adopted by {:?}", sandbox, owners);
            }
        }
        // Whatever events were lost: after one list, every claim has a sandbox of its own as long as there are any.
        controller.list(&server);
        for claim in 0..20 {
            for _ in 0..3 {
                controller.serve(&mut server, claim);
            }
        }
        let free = server.sandboxes.values().filter(|r| r.claim.is_none()).count();
        for claim in 0..20 {
            prop_assert!(server.owned_by(claim).is_some() || free == 0);
            let owned = server.sandboxes.values().filter(|r| r.claim == Some(claim)).count();
            prop_assert!(owned <= 1, "claim {} owns {}", claim, owned);
        }
    }

    #[test]
    fn a_candidate_is_taken_by_one_at_a_time(takes in 1..30usize, offers in 0..30usize) {
        let mut candidates = Candidates::default();
        for number in 0..offers {
            candidates.offer(candidate(&key(number)));
            candidates.offer(candidate(&key(number))); // duplicate event
        }
        let taken: Vec<_> = (0..takes).filter_map(|_| candidates.take(|_| true)).map(|c| c.key).collect();
        let distinct: HashSet<_> = taken.iter().collect();
        prop_assert_eq!(distinct.len(), taken.len());
        prop_assert_eq!(taken.len(), takes.min(offers));
        prop_assert_eq!(candidates.free(), offers - taken.len());
    }
}

#[test]
fn candidates_are_taken_ready_first_from_the_fullest_node_oldest_first() {
    let mut candidates = Candidates::default();
    let mut offer = |number, ready, node: &str, created| {
        let node = Some(node.to_owned());
        candidates.offer(Candidate {
            ready,
            node,
            created,
            ..candidate(&key(number))
        });
    };
    offer(1, false, "a", 1);
    offer(2, true, "b", 1);
    offer(3, true, "a", 3);
    offer(4, true, "a", 2);
    let order: Vec<_> = (0..4)
        .filter_map(|_| candidates.take(|_| true))
        .map(|c| c.key.name)
        .collect();
    assert_eq!(order, ["s4", "s3", "s2", "s1"]);
}

#[test]
fn the_index_follows_the_cache_for_any_order_of_events() {
    let assigner = Assigner::default();
    let pooled = Arc::new(pooled("SandboxWarmPool", Some("p")));
    let claimed = Arc::new(self::pooled("SandboxClaim", None));
    let key = Key::of(&pooled.metadata);
    assigner.refresh(&key, || Some(pooled.clone()));
    // It is claimed; the event of the older version comes last, and the newer one is in the cache.
    assigner.refresh(&key, || Some(claimed.clone()));
    assigner.refresh(&key, || Some(claimed.clone()));
    assert!(assigner.take("uid", |_| true).is_none());
    assigner.refresh(&key, || Some(pooled.clone()));
    assert!(assigner.take("uid", |_| true).is_some());
    assert!(assigner.take("uid", |_| true).is_none(), "taken");
    assigner.refresh(&key, || None);
    assert!(assigner.take("uid", |_| true).is_none(), "gone");
}

fn pooled(owner: &str, pool: Option<&str>) -> Sandbox {
    let mut sandbox = Sandbox::new("s", crate::crd::SandboxSpec::default());
    let labels = [(TEMPLATE_REF_HASH, Some("t")), (WARM_POOL, pool)];
    let labels = labels
        .into_iter()
        .filter_map(|(k, v)| Some((k.to_owned(), v?.to_owned())));
    sandbox.metadata.labels = Some(labels.collect());
    sandbox.metadata.owner_references = Some(vec![
        k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference {
            kind: owner.to_owned(),
            uid: "uid".to_owned(),
            controller: Some(true),
            ..Default::default()
        },
    ]);
    sandbox
}
