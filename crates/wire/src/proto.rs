//! Generated from `proto/k8e/guest/v1`; do not edit, run `cargo xtask codegen`.
#![allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    reason = "generated"
)]

include!("gen/k8e.guest.v1.rs");
