//! Session selection for runs that name none: property test of random histories against a model.

use super::expiry::{MINUTE, pass};
use super::*;
use k8e_engine::SecretOwner;
use k8e_model::{
    ClientKind, EgressPolicy, Labels, LifetimeSpec, RuntimeKind, SecretName, SecretRef, SecretRefs,
    SecretValue, SessionOrigin, SubAgentSpec, TimeLimit,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Long enough for chains of make, change, restart and use; a step takes milliseconds.
const STEPS_MAX: usize = 24;
const CASES: u32 = 24;

/// Kinds of options, see [`options`].
const OPTIONS: usize = 10;

/// A request: principal, client kind, tenant and options.
#[derive(Clone, Copy, Debug)]
struct Ask {
    who: usize,
    client: usize,
    tenant: usize,
    options: usize,
}

#[derive(Clone, Debug)]
enum Step {
    Run(Ask),
    /// A run whose command does not exist.
    Fail(Ask),
    Fresh(Ask),
    Create(Ask),
    /// Of one of the sessions so far.
    SubAgent(usize),
    AllowHosts(usize),
    Destroy(usize),
    /// Sessions that end when they are idle do so.
    Expire,
    Restart,
}

/// A session that a step made.
#[derive(Clone, Debug)]
struct Known {
    id: SessionId,
    who: usize,
    origin: SessionOrigin,
    /// With the server's defaults filled in.
    spec: SessionSpec,
    alive: bool,
}

struct History {
    server: TwoRuntimes,
    known: Vec<Known>,
}

/// A server with a default runtime and another.
struct TwoRuntimes {
    _dir: tempfile::TempDir,
    store: Store,
    drivers: Vec<Arc<dyn Driver>>,
    sessions: Sessions,
}

fn principals() -> [Principal; 3] {
    // The operator may use every owner's sessions by id, and no other way.
    [me(), other(), Principal::local()]
}

fn secrets(names: &[&str]) -> SecretRefs {
    let refs = names.iter().map(|name| SecretRef {
        secret: SecretName::new(name, "").unwrap(),
        env_var: name.to_uppercase(),
    });
    SecretRefs::try_from(refs.collect::<Vec<_>>()).unwrap()
}

fn hosts(hosts: &[&str]) -> EgressPolicy {
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    EgressPolicy::parse(&hosts).unwrap()
}

fn map<T: TryFrom<BTreeMap<String, String>>>(name: &str, value: &str) -> T {
    let map = BTreeMap::from([(name.to_owned(), value.to_owned())]);
    T::try_from(map).ok().expect("one entry is no problem")
}

/// Options number 0 and 1 come to the same, and so do 2 and 3, and 4 and 5; all others differ.
fn options(number: usize) -> SessionSpec {
    let mut spec = SessionSpec::default();
    match number {
        0 => {}
        1 => {
            spec.runtime = Some(RuntimeKind::Native);
            spec.egress = Some(EgressPolicy::None);
        }
        2 => spec.egress = Some(hosts(&["a.example", "b.example"])),
        3 => spec.egress = Some(hosts(&["b.example", "a.example"])),
        4 => spec.secrets = secrets(&["one", "two"]),
        5 => spec.secrets = secrets(&["two", "one"]),
        6 => spec.runtime = Some(RuntimeKind::Gvisor),
        7 => spec.limits.memory_bytes = Some(1024 * 1024 * 1024),
        8 => {
            spec.lifetime = LifetimeSpec {
                ttl: TimeLimit::Never,
                idle: TimeLimit::After(MINUTE),
            }
        }
        _ => {
            spec.labels = map::<Labels>("a", "b");
            spec.env = map("A", "b");
        }
    }
    spec
}

// === impl Ask ===

impl Ask {
    fn spec(self) -> SessionSpec {
        SessionSpec {
            client: [ClientKind::default(), "cli".parse().unwrap()][self.client].clone(),
            tenant: ["t", "u"][self.tenant].parse().ok(),
            ..options(self.options)
        }
    }
}

/// As the rule compares it.
fn canonical(spec: &SessionSpec) -> SessionSpec {
    let mut entries = match &spec.egress {
        Some(policy) => policy.entries(),
        None => EgressPolicy::None.entries(),
    };
    entries.sort();
    SessionSpec {
        id: None,
        runtime: spec.runtime.or(Some(RuntimeKind::Native)),
        egress: Some(EgressPolicy::parse(&entries).unwrap()),
        ..spec.clone()
    }
}

// === impl TwoRuntimes ===

impl TwoRuntimes {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).await.unwrap();
        let drivers: Vec<Arc<dyn Driver>> = vec![
            Arc::new(FakeDriver::new()),
            Arc::new(FakeDriver::of_kind(RuntimeKind::Gvisor)),
        ];
        let sessions = Sessions::start(Config::default(), store.clone(), drivers.clone());
        Self {
            _dir: dir,
            sessions: sessions.await.unwrap(),
            store,
            drivers,
        }
    }

    async fn restart(&mut self) {
        self.sessions.shutdown().await;
        let again = Sessions::start(Config::default(), self.store.clone(), self.drivers.clone());
        self.sessions = again.await.unwrap();
    }
}

// === impl History ===

impl History {
    async fn start() -> Self {
        let server = TwoRuntimes::start().await;
        for who in principals() {
            for name in ["one", "two"] {
                let (secret, value) = (SecretName::new(name, ""), SecretValue::new(b"x".to_vec()));
                let (secret, value) = (secret.unwrap(), value.unwrap());
                let sessions = &server.sessions;
                let set = sessions.set_secret(&who, &SecretOwner::Caller, &secret, &value);
                set.await.unwrap();
            }
        }
        Self {
            server,
            known: Vec::new(),
        }
    }

    /// Sessions that a run for `ask` may use.
    fn allowed(&self, ask: Ask) -> Vec<&SessionId> {
        let wanted = canonical(&ask.spec());
        self.known
            .iter()
            .filter(|known| {
                known.alive
                    && known.origin == SessionOrigin::Run
                    && known.who == ask.who
                    && known.spec == wanted
            })
            .map(|known| &known.id)
            .collect()
    }

    fn learn(&mut self, id: SessionId, ask: Ask, origin: SessionOrigin) {
        assert!(self.known.iter().all(|known| known.id != id), "{id} is new");
        self.known.push(Known {
            id,
            who: ask.who,
            origin,
            spec: canonical(&ask.spec()),
            alive: true,
        });
    }

    /// One of those that are alive, whatever made it.
    fn pick(&self, number: usize) -> Option<usize> {
        let alive: Vec<_> = (0..self.known.len())
            .filter(|at| self.known[*at].alive)
            .collect();
        alive.get(number.checked_rem(alive.len())?).copied()
    }

    fn would_use(&self, ask: Ask) -> Option<SessionId> {
        let who = &principals()[ask.who];
        self.server.sessions.run_session(who, &ask.spec())
    }

    /// The selected session of every possible request.
    fn choices(&self) -> Vec<Option<SessionId>> {
        let mut choices = Vec::new();
        for (who, client) in (0..3).flat_map(|who| [(who, 0), (who, 1)]) {
            for (tenant, options) in (0..OPTIONS).flat_map(|options| [(0, options), (1, options)]) {
                let ask = Ask {
                    who,
                    client,
                    tenant,
                    options,
                };
                let choice = self.would_use(ask);
                match &choice {
                    Some(id) => assert!(self.allowed(ask).contains(&id), "{ask:?} gets {id}"),
                    None => assert!(self.allowed(ask).is_empty(), "{ask:?} gets a new one"),
                }
                choices.push(choice);
            }
        }
        choices
    }

    async fn start_run(
        &self,
        target: RunTarget,
        who: usize,
        command: Command,
    ) -> Result<Run, Error> {
        let request = RunRequest { target, command };
        self.server.sessions.run(&principals()[who], request).await
    }

    async fn step(&mut self, step: Step) {
        match step {
            Step::Run(ask) => {
                let target = RunTarget::Tenant(ask.spec());
                let would = self.would_use(ask);
                let run = self.start_run(target, ask.who, sh("true")).await.unwrap();
                let (id, created) = (run.session_id.clone(), run.session_created);
                finish(run).await.unwrap();
                assert_eq!(would.as_ref(), (!created).then_some(&id), "{ask:?}");
                if created {
                    assert!(self.allowed(ask).is_empty(), "{ask:?} made {id}");
                    self.learn(id, ask, SessionOrigin::Run);
                } else {
                    assert!(self.allowed(ask).contains(&&id), "{ask:?} uses {id}");
                }
            }
            Step::Fail(ask) => {
                let target = RunTarget::Tenant(ask.spec());
                let nothing = argv(&["no-such-program"]);
                let failed = self.start_run(target, ask.who, nothing).await;
                refused(failed, Code::Invalid, "no-such-program");
            }
            Step::Fresh(ask) => {
                let target = RunTarget::Fresh(ask.spec());
                let run = self
                    .start_run(target, ask.who, sh("sleep 600"))
                    .await
                    .unwrap();
                self.learn(run.session_id.clone(), ask, SessionOrigin::FreshRun);
                self.choices();
                drop(run);
                self.known.last_mut().unwrap().alive = false;
            }
            Step::Create(ask) => {
                let who = &principals()[ask.who];
                let made = self.server.sessions.create(who, ask.spec()).await.unwrap();
                self.learn(made.session.id, ask, SessionOrigin::Create);
            }
            Step::SubAgent(number) => {
                let Some(parent) = self.pick(number).map(|at| self.known[at].clone()) else {
                    return;
                };
                let who = &principals()[parent.who];
                let spec = SubAgentSpec::new("", "").unwrap();
                let made = self.server.sessions.create_sub_agent(who, &parent.id, spec);
                match made.await {
                    Ok(made) => self.known.push(Known {
                        id: made.session.id,
                        origin: SessionOrigin::SubAgent,
                        ..parent
                    }),
                    Err(error) => assert!(error.to_string().contains("sub-agent"), "{error}"),
                }
            }
            Step::AllowHosts(number) => {
                let Some(at) = self.pick(number) else { return };
                let known = &mut self.known[at];
                let who = &principals()[known.who];
                let policy = hosts(&["a.example", "b.example"]);
                let changed = self
                    .server
                    .sessions
                    .set_allowed_hosts(who, &known.id, policy);
                match changed.await {
                    Ok(policy) => {
                        known.spec.egress = Some(policy);
                        known.spec = canonical(&known.spec);
                    }
                    Err(_) => assert_eq!(known.origin, SessionOrigin::SubAgent),
                }
            }
            Step::Destroy(number) => {
                let Some(at) = self.pick(number) else { return };
                let who = &principals()[self.known[at].who];
                let gone = self.server.sessions.destroy(who, &self.known[at].id).await;
                gone.unwrap();
            }
            Step::Expire => {
                pass(2 * MINUTE).await;
                for known in &self.known {
                    if known.alive && known.spec.lifetime.idle == TimeLimit::After(MINUTE) {
                        self.ended(known).await;
                    }
                }
            }
            Step::Restart => {
                let before = self.choices();
                self.server.restart().await;
                assert_eq!(self.choices(), before, "a restart changes no choice");
            }
        }
        self.look().await;
    }

    async fn ended(&self, known: &Known) {
        let who = &principals()[known.who];
        let over = async {
            loop {
                let view = self.server.sessions.get(who, &known.id).await.unwrap();
                if view.session.phase == Phase::Ended {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let over = tokio::time::timeout(PATIENCE, over).await;
        over.expect("an idle session ends");
    }

    /// Updates the model with ended sessions, and checks origin and owner in the records.
    async fn look(&mut self) {
        for known in &mut self.known {
            let who = &principals()[known.who];
            let view = self.server.sessions.get(who, &known.id).await.unwrap();
            known.alive &= view.session.phase == Phase::Active;
            assert_eq!(view.session.origin, known.origin);
            assert_eq!(view.session.client, known.spec.client);
            assert_eq!(view.session.owner, who.name());
        }
        self.choices();
    }
}

fn ask() -> impl Strategy<Value = Ask> {
    // Few enough for the same to be asked for again and again.
    (0..3_usize, 0..2_usize, 0..2_usize, 0..OPTIONS).prop_map(|(who, client, tenant, options)| {
        Ask {
            who,
            client,
            tenant,
            options,
        }
    })
}

fn step() -> impl Strategy<Value = Step> {
    // The same few runs over and over, and everything else between them.
    let usual = (0..2_usize, 0..2_usize, 0..3_usize).prop_map(|(who, client, options)| Ask {
        who,
        client,
        tenant: 0,
        options,
    });
    prop_oneof![
        6 => usual.clone().prop_map(Step::Run),
        3 => ask().prop_map(Step::Run),
        1 => usual.clone().prop_map(Step::Fail),
        1 => usual.clone().prop_map(Step::Fresh),
        3 => usual.prop_map(Step::Create),
        1 => ask().prop_map(Step::Create),
        2 => any::<usize>().prop_map(Step::SubAgent),
        2 => any::<usize>().prop_map(Step::AllowHosts),
        1 => any::<usize>().prop_map(Step::Destroy),
        1 => Just(Step::Expire),
        2 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: CASES,
        // Shrinking runs a history again and again: short ones are readable as they are.
        max_shrink_iters: 64,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_run_uses_only_what_such_a_run_made(steps in prop::collection::vec(step(), 1..STEPS_MAX)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut history = History::start().await;
            for step in steps {
                history.step(step).await;
            }
        });
    }
}
