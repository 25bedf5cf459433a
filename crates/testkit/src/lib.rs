//! What tests stand on: a driver without isolation, and guests that say what a test wants them to.
//!
//! Only ever a dev-dependency. [`mod@conformance`] is the suite that every driver must pass.

pub mod conformance;

mod driver;
mod scripted;
mod thread;

pub use driver::FakeDriver;
pub use scripted::{Script, ScriptedGuest, Step, frame, hello};
