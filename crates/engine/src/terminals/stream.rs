//! Output stream of a terminal.
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

/// Event of an attached terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TerminalEvent {
    /// Bytes of its output.
    Data(Bytes),
    /// Last event: its command exited.
    Exited(TerminalExit),
}

/// Output of a terminal: scrollback, then live output. Dropping it does not end the terminal.
pub struct TerminalStream {
    /// None after the last event.
    call: Option<Call>,
    empties: u32,
}

// === impl Sessions ===

impl Sessions {
    /// Attaches to a terminal: streams its scrollback, then its output, up to its exit.
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
            _ => Err(call.misbehaved("it did not report what runs")),
        }
    }
}

// === impl TerminalStream ===

impl TerminalStream {
    /// The next event; none after the last. No timeout. Cancel safe.
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
                    Err(call.misbehaved("it sent a message that does not belong to a terminal"))
                }
                Err(error) => Err(error),
            };
            self.call = None;
            return Some(event);
        }
    }
}
