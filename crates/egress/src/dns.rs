//! DNS server of a sandbox, and the caching stub resolver behind it.
//!
//! A query is parsed strictly ([`message`]) and checked against the policy ([`lookup()`]); upstream
//! resolvers are queried only for A records of an allowed name ([`resolver`]). The addresses of a
//! reply are recorded *before* it is sent ([`sent_replies`]): connections are checked against them.

mod cache;
pub(crate) mod fuzzing;
mod lookup;
mod message;
mod name;
mod query_limits;
mod reply;
mod resolver;
mod sent_replies;
mod server;
mod single_flight;
mod upstream;

pub(crate) use lookup::lookup;
pub(crate) use query_limits::QueryLimits;
pub(crate) use resolver::Resolver;
pub(crate) use sent_replies::SentReplies;
pub(crate) use server::{serve_tcp, serve_udp};

use std::time::Duration;

/// How long a connection to an address of a sent reply is allowed. Longer than any TTL in a reply
/// ([`message::SENT_TTL_MAX`]): many programs resolve a name once and ignore its TTL.
const SENT_REPLY_LIFETIME: Duration = Duration::from_secs(600);

#[cfg(test)]
mod test_upstream;
#[cfg(test)]
mod tests;
