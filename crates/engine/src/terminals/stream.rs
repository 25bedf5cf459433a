//! Reading a terminal.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use super::{TerminalExit, exit};
use crate::guest::{Call, broken};
use crate::live::left_active;
use crate::{Error, Sessions};
use bytes::Bytes;
use k8e_model::{Principal, TerminalId};
use k8e_wire::proto::{AttachTerminal, reply, request};

/// What a terminal says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TerminalEvent {
    /// Bytes.
    Data(Bytes),
    /// Last.
    Exited(TerminalExit),
}

/// The end of what a terminal said, and what it says. Dropping it does not end the terminal.
pub struct TerminalStream {
    /// None when it is over.
    call: Option<Call>,
    empties: u32,
}

// === impl Sessions ===

impl Sessions {
    /// Reads a terminal: the end of what it said so far, then what it says, up to its end.
    pub async fn attach_terminal(
        &self,
        who: &Principal,
        id: &TerminalId,
    ) -> Result<TerminalStream, Error> {
        let entry = self.shared.terminals.find(who, id)?;
        let attach = |id| request::Call::AttachTerminal(AttachTerminal { id });
        let mut call = self
            .shared
            .start_terminal_call(&entry, attach, "attach to")
            .await?;
        let first = call.reply().await;
        match self.shared.forget_missing(id, first).await? {
            reply::Reply::Started(_) => Ok(TerminalStream {
                call: Some(call),
                empties: 0,
            }),
            _ => Err(call.misbehaved("it did not say what runs")),
        }
    }
}

// === impl TerminalStream ===

impl TerminalStream {
    /// What comes next; none after the last. Waits for as long as that takes. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<TerminalEvent, Error>> {
        loop {
            let call = self.call.as_mut()?;
            let reply = tokio::select! {
                biased;
                () = left_active(&mut call.phases) => Err(call.used.live.gone()),
                reply = call.replies.next() => match reply {
                    Ok(reply) => Ok(reply),
                    Err(error) => Err(broken(&call.used, &mut call.phases, &error).await),
                },
            };
            let event = match reply {
                Ok(reply::Reply::Data(data)) if data.is_empty() => {
                    match call.count_empty(&mut self.empties) {
                        Ok(()) => continue,
                        Err(error) => Err(error),
                    }
                }
                Ok(reply::Reply::Data(data)) => return Some(Ok(TerminalEvent::Data(data))),
                Ok(reply::Reply::Exited(exited)) => match exit(&exited) {
                    Some(exit) => Ok(TerminalEvent::Exited(exit)),
                    None => Err(call.misbehaved("it reported an impossible exit code")),
                },
                Ok(reply::Reply::Error(error)) => Err(call.refused(&error)),
                Ok(_) => {
                    Err(call.misbehaved("it said something that does not belong to a terminal"))
                }
                Err(error) => Err(error),
            };
            self.call = None;
            return Some(event);
        }
    }
}
