//! Cohort.
