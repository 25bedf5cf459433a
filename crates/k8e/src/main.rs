//! k8e
fn main() {}
