//! Test support: a fake driver without isolation, an in-process guest, and scripted (hostile) guests.
//!
//! A dev-dependency only. [`mod@conformance`] is the conformance suite that every driver must pass.

pub mod conformance;

mod driver;
mod scripted;
mod thread;

pub use driver::FakeDriver;
pub use scripted::{Script, ScriptedGuest, Step, frame, hello};
