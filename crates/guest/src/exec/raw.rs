//! Raw system calls without libc, for processes that share the guest's memory.

mod sys;

pub(super) use sys::{call, clone};
