//! Micro guests.
