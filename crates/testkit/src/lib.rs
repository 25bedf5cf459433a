//! What tests stand on: a driver without isolation, and guests that say what a test wants them to.
//!
//! Only ever a dev-dependency. The suite that every driver must pass will live here too.

mod driver;
mod scripted;
mod thread;

pub use driver::FakeDriver;
pub use scripted::{Script, ScriptedGuest, Step, frame, hello};
