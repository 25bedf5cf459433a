//! The resolver that a sandbox sees, and the one behind it.
//!
//! A question is read strictly ([`message`]), put to the policy ([`look_up()`]), and only for the
//! addresses of an allowed name is anybody asked ([`resolver`]). What the sandbox is told is written
//! down *before* it is told ([`answers`]): the check of connections goes by that.

mod answer;
mod answers;
mod cache;
mod exchange;
mod flights;
pub(crate) mod fuzzing;
mod look_up;
mod message;
mod name;
mod questions;
mod resolver;
mod serve;

pub(crate) use answers::Answers;
pub(crate) use look_up::look_up;
pub(crate) use questions::Questions;
pub(crate) use resolver::Resolver;
pub(crate) use serve::{serve_tcp, serve_udp};

use std::time::Duration;

/// How long the gate believes what it told a sandbox. Longer than any TTL that is told
/// ([`message::TOLD_TTL_MAX`]): many programs keep an address for as long as they run a loop, and
/// do not ask for the TTL.
const BELIEVED_FOR: Duration = Duration::from_secs(600);

#[cfg(test)]
mod scripted;
#[cfg(test)]
mod tests;
