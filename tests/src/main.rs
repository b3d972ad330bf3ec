//! Placeholder until its author fills it.
fn main() {}
