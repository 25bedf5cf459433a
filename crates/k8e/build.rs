//! Embeds the guest, which is a static program of its own (`cargo xtask build` makes both).

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-env-changed=K8E_GUEST_BIN");
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let built = format!("../../target/guest/{arch}-unknown-linux-gnu/guest/k8e-guest");
    let guest = env::var_os("K8E_GUEST_BIN").map_or(PathBuf::from(built), PathBuf::from);
    println!("cargo:rerun-if-changed={}", guest.display());
    // Without it everything builds, and `k8e server` says what is missing.
    let bytes = fs::read(&guest).unwrap_or_default();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("guest.bin"), bytes).expect("OUT_DIR can be written");
}
