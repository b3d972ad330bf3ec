//! The cohort program.
fn main() {}
