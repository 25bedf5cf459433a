//! End-to-end tests: the built binary, real sandboxes, as root.

mod cli;
mod crash;
mod escape;
