//! Creation of a terminal (PTY).
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use super::{PER_SESSION_MAX, TerminalView};
use crate::guest::Call;
use crate::live::{Live, Purpose};
use crate::metrics;
use crate::recorder::now_ms;
use crate::run::{exec, refused, shown};
use crate::sessions::Shared;
use crate::{Error, RunTarget, Sessions, secrets};
use k8e_model::{Command, Principal, TerminalId};
use k8e_store::TerminalRecord;
use k8e_wire::proto::{CreateTerminal, EndTerminal, Started, reply, request};
use serde_json::json;
use std::sync::Arc;

/// Request for a new terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TerminalRequest {
    /// Session to create it in.
    pub target: RunTarget,
    /// Command that runs on it: a program with its arguments.
    pub command: Command,
    /// Height in characters; 0 is 24.
    pub rows: u16,
    /// Width in characters; 0 is 80.
    pub cols: u16,
}

// === impl Sessions ===

impl Sessions {
    /// Creates a terminal, in an existing session or one created for it; returns whether the session is new.
    pub async fn create_terminal(
        &self,
        who: &Principal,
        request: TerminalRequest,
    ) -> Result<(TerminalView, bool), Error> {
        let mut audit = self.audited(who, "terminal.create", request.target.named());
        let made = self.create_terminal_in(who, request).await;
        if let Ok((view, _)) = &made {
            audit.about(view.id.as_str());
        }
        audit.end(made)
    }

    async fn create_terminal_in(
        &self,
        who: &Principal,
        request: TerminalRequest,
    ) -> Result<(TerminalView, bool), Error> {
        let spec = match &request.target {
            RunTarget::Tenant(spec) => spec.clone(),
            RunTarget::Existing(id) => {
                let live = self.live(who, id).await?;
                return Ok((self.begin_terminal(live, &request).await?, false));
            }
            RunTarget::Fresh(_) => {
                let what = "a terminal needs a session that stays: leave out fresh";
                return Err(Error::Invalid(what.to_owned()));
            }
        };
        let start = |live, _| self.begin_terminal(live, &request);
        self.start_in_run_session(who, &spec, start).await
    }

    /// Runs in its own task, to the end also when this future is dropped: the terminal is then listed.
    async fn begin_terminal(
        &self,
        live: Arc<Live>,
        request: &TerminalRequest,
    ) -> Result<TerminalView, Error> {
        let Ok(work) = Arc::clone(&self.shared.work).try_read_owned() else {
            return Err(Error::Stopping);
        };
        let (shared, request) = (Arc::clone(&self.shared), request.clone());
        let begun = self.shared.runtime.spawn(async move {
            let _work = work;
            shared.make_terminal(live, &request).await
        });
        begun.await.unwrap_or(Err(Error::Stopping))
    }
}

// === impl Shared ===

impl Shared {
    async fn make_terminal(
        self: &Arc<Self>,
        live: Arc<Live>,
        request: &TerminalRequest,
    ) -> Result<TerminalView, Error> {
        live.check_active()?;
        if self.terminals.of(&live).len() >= PER_SESSION_MAX {
            self.make_room(&live).await?;
        }
        let record = TerminalRecord {
            id: TerminalId::random(),
            session: live.record.id.clone(),
            program: shown(&request.command.program),
            created_at: now_ms(),
        };
        self.reserve(&live, &record)?;
        let made = async {
            self.store.insert_terminal(&record).await?;
            self.call_for_terminal(&live, &record, request).await
        };
        let pid = match made.await {
            Ok(pid) => pid,
            Err(error) => {
                self.forget_terminal(&record.id).await;
                if let Error::GuestGone(_) = error {
                    self.end_sandbox(&live, "died", "the sandbox's agent is gone");
                    return Err(live.gone());
                }
                return Err(error);
            }
        };
        let detail =
            json!({ "terminal_id": record.id.as_str(), "program": record.program, "pid": pid });
        self.recorder
            .event(&live.record, "terminal_created", detail);
        Ok(TerminalView {
            id: record.id,
            session: record.session,
            pid,
            program: record.program,
            rows: if request.rows == 0 {
                24
            } else {
                request.rows.into()
            },
            cols: if request.cols == 0 {
                80
            } else {
                request.cols.into()
            },
            created_at: record.created_at,
            exited: None,
        })
    }

    /// Reserves a slot within the limits of the session and the server.
    fn reserve(&self, live: &Arc<Live>, record: &TerminalRecord) -> Result<(), Error> {
        let busy = |id| Error::SessionBusy {
            id,
            what: "terminals",
            max: PER_SESSION_MAX,
        };
        let max = self.config.terminals_max;
        if self.terminals.map().len() >= max {
            return Err(metrics::refused(Error::TerminalsFull { max }));
        }
        if self.terminals.of(live).len() >= PER_SESSION_MAX {
            return Err(metrics::refused(busy(live.record.id.clone())));
        }
        self.terminals.add(Arc::clone(live), record.clone());
        Ok(())
    }

    /// Evicts terminals that the guest does not list, and if none, the oldest one that has exited.
    async fn make_room(&self, live: &Arc<Live>) -> Result<(), Error> {
        let views = self.look_at_terminals(live).await?;
        if views.len() < PER_SESSION_MAX {
            return Ok(());
        }
        // The newest are first.
        let Some(over) = views.into_iter().rfind(|view| view.exited.is_some()) else {
            return Ok(());
        };
        let used = live.begin(Purpose::Call, 0, &self.recorder)?;
        let id = over.id.to_string();
        let end = request::Call::EndTerminal(EndTerminal { id, grace_ms: 0 });
        let mut call = Call::start(used, end, "forget a terminal".to_owned()).await?;
        call.any_reply().await?;
        self.forget_terminal(&over.id).await;
        Ok(())
    }

    /// Sends `CreateTerminal`; returns the command's pid once the guest reports the start.
    async fn call_for_terminal(
        &self,
        live: &Arc<Live>,
        record: &TerminalRecord,
        request: &TerminalRequest,
    ) -> Result<i32, Error> {
        let used = live.begin(Purpose::Call, 0, &self.recorder)?;
        let secrets = secrets::resolve(&self.store, &live.record).await?;
        let create = request::Call::CreateTerminal(CreateTerminal {
            id: record.id.to_string(),
            exec: Some(exec(&live.record, &secrets, &request.command, None)),
            rows: request.rows.into(),
            cols: request.cols.into(),
            awaits_reader: false,
        });
        let mut call = Call::start(used, create, "make a terminal".to_owned()).await?;
        match call.any_reply().await? {
            reply::Reply::Started(Started { pid }) if pid > 0 => Ok(pid),
            reply::Reply::Error(error) => Err(refused(&call, &error, &request.command.program)),
            _ => Err(call.misbehaved("it did not report that a command started")),
        }
    }
}
