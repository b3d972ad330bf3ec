//! Inside and outside of the lab.
