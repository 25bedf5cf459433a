//! The migrations are embedded by a macro, which does not see new files by itself.

fn main() {
    println!("cargo::rerun-if-changed=migrations");
}
