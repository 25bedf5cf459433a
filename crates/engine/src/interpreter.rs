//! Code interpreter: contexts in which code runs cell by cell, and keeps its variables.
//!
//! A context has one kernel, a process in the sandbox that is started with the first execution and runs one execution at
//! a time; others wait in order. A kernel that died is replaced by the next execution. Contexts belong to the live
//! session and end with it, or with the server.

mod kernel;
mod protocol;

/// For the crate `fuzz`.
pub(crate) mod fuzzing {
    pub use super::protocol::fuzzing::*;
}

use crate::{Error, Sessions};
use k8e_model::{Env, Language, Principal, SessionId};
use kernel::{Kernel, Request};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc;

/// Contexts of one session: each has a process in the sandbox, and the server holds a message of each while it runs code.
const CONTEXTS_MAX: usize = 16;

/// Code of one execution: it is held while it waits for earlier ones. Larger data belongs into a file.
const CODE_BYTES_MAX: usize = 2 * 1024 * 1024;

/// Events on their way to the reader of an execution. A reader that is slower than the code slows it down, as a pipe does.
const EVENTS_MAX: usize = 2;

/// What a context is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextSpec {
    /// Language of its code.
    pub language: Language,
    /// Directory that it starts in, absolute.
    pub cwd: String,
    /// User that it runs as.
    pub user: String,
}

/// A context in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextView {
    /// Its id, random.
    pub id: String,
    /// What it is made of.
    pub spec: ContextSpec,
}

/// Which context code runs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContextChoice {
    /// The one with this id.
    Id(String),
    /// The default context of this language, which is made with the first use.
    Default(ContextSpec),
}

/// Request to run code.
#[derive(Clone, Debug)]
pub struct Execute {
    /// The context.
    pub context: ContextChoice,
    /// The code.
    pub code: String,
    /// Environment variables during this execution.
    pub env: Env,
}

/// Event of an execution: `Started`, then the others in any order. What they contain are claims of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExecutionEvent {
    /// Its turn has come.
    Started {
        /// Number of this execution in its kernel, from 1.
        count: u64,
    },
    /// Bytes of standard output.
    Stdout(Vec<u8>),
    /// Bytes of standard error.
    Stderr(Vec<u8>),
    /// A value that was displayed, or the last one.
    Result {
        /// Whether it is the value of the last expression.
        main: bool,
        /// By MIME type: text; binary types in base64, JSON types as JSON.
        data: Vec<(String, String)>,
    },
    /// An exception, or the reason why the kernel or the execution ended; at most one.
    Error {
        /// Its class.
        name: String,
        /// Its message.
        value: String,
        /// Its stack, for people.
        traceback: String,
    },
}

/// Events of an execution. Dropping it interrupts the execution.
pub struct Execution {
    events: mpsc::Receiver<ExecutionEvent>,
}

/// Contexts of a live session, in the order of their creation.
#[derive(Default)]
pub(crate) struct Contexts(Mutex<Vec<Arc<Context>>>);

struct Context {
    id: String,
    spec: ContextSpec,
    /// Whether it is the one for executions that name no context.
    is_default: bool,
    /// Locked while a kernel starts.
    kernel: tokio::sync::Mutex<Option<Kernel>>,
}

// === impl Sessions ===

impl Sessions {
    /// Makes a context and starts its kernel.
    pub async fn create_context(
        &self,
        who: &Principal,
        session: &SessionId,
        spec: ContextSpec,
    ) -> Result<ContextView, Error> {
        let audit = self.audited(who, "context.create", session.as_str());
        let created = async {
            let live = self.live(who, session).await?;
            live.check_awake()?;
            let context = live.contexts.add(spec, false)?;
            let started = self.with_kernel(who, session, &context, |_| Ok(())).await;
            if let Err(error) = started {
                live.contexts.take(&context.id);
                return Err(error);
            }
            Ok(context.view())
        };
        audit.end(created.await)
    }

    /// The contexts of a session. `defaults` are made first where they are missing, without kernels.
    pub async fn list_contexts(
        &self,
        who: &Principal,
        session: &SessionId,
        defaults: Vec<ContextSpec>,
    ) -> Result<Vec<ContextView>, Error> {
        let live = self.live(who, session).await?;
        live.check_awake()?;
        for spec in defaults {
            live.contexts.default_of(spec)?;
        }
        let contexts = live.contexts.list();
        Ok(contexts.iter().map(|context| context.view()).collect())
    }

    /// Starts a context anew: its variables are lost, what it runs fails.
    pub async fn restart_context(
        &self,
        who: &Principal,
        session: &SessionId,
        id: &str,
    ) -> Result<(), Error> {
        let audit = self.audited(who, "context.restart", session.as_str());
        let restarted = async {
            let live = self.live(who, session).await?;
            live.check_awake()?;
            let context = live.contexts.find(id)?;
            drop(context.kernel.lock().await.take());
            self.with_kernel(who, session, &context, |_| Ok(())).await
        };
        audit.end(restarted.await)
    }

    /// Removes a context and ends its kernel.
    pub async fn remove_context(
        &self,
        who: &Principal,
        session: &SessionId,
        id: &str,
    ) -> Result<(), Error> {
        let audit = self.audited(who, "context.remove", session.as_str());
        let removed = async {
            let live = self.live(who, session).await?;
            live.check_awake()?;
            let context = live.contexts.take(id);
            let context = context.ok_or_else(|| Error::ContextNotFound(shown(id)))?;
            drop(context.kernel.lock().await.take());
            Ok(())
        };
        audit.end(removed.await)
    }

    /// Runs code in a context. Returns when its kernel runs and has taken it.
    pub async fn execute(
        &self,
        who: &Principal,
        session: &SessionId,
        request: Execute,
    ) -> Result<Execution, Error> {
        let audit = self.audited(who, "code.execute", session.as_str());
        audit.end(self.execute_in(who, session, request).await)
    }

    async fn execute_in(
        &self,
        who: &Principal,
        session: &SessionId,
        request: Execute,
    ) -> Result<Execution, Error> {
        let Execute { context, code, env } = request;
        if code.len() > CODE_BYTES_MAX {
            return Err(Error::Invalid(format!(
                "code is {} bytes, at most {CODE_BYTES_MAX} are allowed: write data to a file and read it from there",
                code.len()
            )));
        }
        let live = self.live(who, session).await?;
        live.check_awake()?;
        let context = match context {
            ContextChoice::Id(id) => live.contexts.find(&id)?,
            ContextChoice::Default(spec) => live.contexts.default_of(spec)?,
        };
        protocol::check(context.spec.language, &code, &env)?;
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let request = Request {
            code,
            env,
            events: sender,
        };
        self.with_kernel(who, session, &context, |kernel| kernel.submit(request))
            .await?;
        Ok(Execution { events })
    }

    /// Does something with the kernel of a context, which is started if it does not run.
    async fn with_kernel<T>(
        &self,
        who: &Principal,
        session: &SessionId,
        context: &Context,
        with: impl FnOnce(&Kernel) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut slot = context.kernel.lock().await;
        if let Some(kernel) = slot.as_ref().filter(|kernel| kernel.is_alive()) {
            return with(kernel);
        }
        let kernel = Kernel::start(self, who, session, &context.spec).await?;
        with(slot.insert(kernel))
    }
}

// === impl Contexts ===

impl Contexts {
    fn all(&self) -> MutexGuard<'_, Vec<Arc<Context>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn list(&self) -> Vec<Arc<Context>> {
        self.all().clone()
    }

    fn find(&self, id: &str) -> Result<Arc<Context>, Error> {
        let found = self.all().iter().find(|context| context.id == id).cloned();
        found.ok_or_else(|| Error::ContextNotFound(shown(id)))
    }

    fn take(&self, id: &str) -> Option<Arc<Context>> {
        let mut all = self.all();
        let at = all.iter().position(|context| context.id == id)?;
        Some(all.remove(at))
    }

    fn default_of(&self, spec: ContextSpec) -> Result<Arc<Context>, Error> {
        let is_it =
            |context: &&Arc<Context>| context.is_default && context.spec.language == spec.language;
        let found = self.all().iter().find(is_it).cloned();
        match found {
            Some(context) => Ok(context),
            None => self.add(spec, true),
        }
    }

    fn add(&self, spec: ContextSpec, is_default: bool) -> Result<Arc<Context>, Error> {
        let context = Arc::new(Context {
            id: kernel::random_id()?,
            spec,
            is_default,
            kernel: tokio::sync::Mutex::default(),
        });
        let mut all = self.all();
        if all.len() >= CONTEXTS_MAX {
            return Err(Error::ContextsFull { max: CONTEXTS_MAX });
        }
        // Two at once may both have found none.
        let language = context.spec.language;
        let twin = |other: &&Arc<Context>| other.is_default && other.spec.language == language;
        if let Some(other) = all.iter().find(twin).filter(|_| is_default) {
            return Ok(Arc::clone(other));
        }
        all.push(Arc::clone(&context));
        Ok(context)
    }
}

// === impl Context ===

impl Context {
    fn view(&self) -> ContextView {
        ContextView {
            id: self.id.clone(),
            spec: self.spec.clone(),
        }
    }
}

// === impl Execution ===

impl Execution {
    /// The next event; none after the end. Cancel safe.
    pub async fn next(&mut self) -> Option<ExecutionEvent> {
        self.events.recv().await
    }
}

/// An id of a client's, for an error.
fn shown(id: &str) -> String {
    crate::guest::clean(&id.chars().take(64).collect::<String>())
}
