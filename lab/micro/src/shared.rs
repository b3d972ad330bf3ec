// SPDX-License-Identifier: GPL-2.0-only
//! The flags, locks and barriers that the programs of one guest name, and their places in the state file.

use crate::layout::SHARED_OBJECTS;
use crate::program::{Program, Step};

/// What a shared name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A word that `set`, `clear` and `add` change and `spin` waits for.
    Flag = 1,
    /// A fair ticket lock.
    Lock = 2,
    /// A barrier of all vCPUs whose program names it.
    Barrier = 3,
}

impl Kind {
    fn noun(self) -> &'static str {
        match self {
            Self::Flag => "a flag",
            Self::Lock => "a lock",
            Self::Barrier => "a barrier",
        }
    }
}

/// One named object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Its name, unique in the guest.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// How many vCPUs' programs name it.
    pub participants: u32,
}

/// Why the programs of a guest do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SharedError {
    /// One name, two meanings.
    #[error(
        "`{name}` is {first} in one place and {second} in the program of vCPU {vcpu}: give one of them another name"
    )]
    TwoKinds {
        /// The name.
        name: String,
        /// What it is where it was named first.
        first: &'static str,
        /// What it is here.
        second: &'static str,
        /// Whose program.
        vcpu: usize,
    },
    /// More names than the state file has room for.
    #[error(
        "the programs name more than {SHARED_OBJECTS} flags, locks and barriers: share some of them"
    )]
    TooMany,
}

/// All named objects of a guest, in the order in which the programs name them.
#[derive(Clone, Debug, Default)]
pub struct SharedTable {
    objects: Vec<Object>,
}

impl SharedTable {
    /// Collects the names of all programs, program n being that of vCPU n.
    pub fn collect(programs: &[Program]) -> Result<Self, SharedError> {
        let mut table = Self::default();
        for (vcpu, program) in programs.iter().enumerate() {
            table.add_program(vcpu, program)?;
        }
        Ok(table)
    }

    /// The objects; an object's index is its place in the state file.
    pub fn objects(&self) -> &[Object] {
        &self.objects
    }

    /// Index and object of a name.
    pub fn get(&self, name: &str) -> Option<(usize, &Object)> {
        self.objects
            .iter()
            .enumerate()
            .find(|(_, object)| object.name == name)
    }

    fn add_program(&mut self, vcpu: usize, program: &Program) -> Result<(), SharedError> {
        let mut seen: Vec<usize> = Vec::new();
        for (name, kind) in program.steps().iter().filter_map(named) {
            let index = self.index_of(vcpu, name, kind)?;
            if !seen.contains(&index) {
                seen.push(index);
                self.objects[index].participants += 1;
            }
        }
        Ok(())
    }

    fn index_of(&mut self, vcpu: usize, name: &str, kind: Kind) -> Result<usize, SharedError> {
        if let Some((index, object)) = self.get(name) {
            if object.kind == kind {
                return Ok(index);
            }
            let (first, second) = (object.kind.noun(), kind.noun());
            return Err(SharedError::TwoKinds {
                name: name.into(),
                first,
                second,
                vcpu,
            });
        }
        if self.objects.len() == SHARED_OBJECTS {
            return Err(SharedError::TooMany);
        }
        self.objects.push(Object {
            name: name.into(),
            kind,
            participants: 0,
        });
        Ok(self.objects.len() - 1)
    }
}

fn named(step: &Step) -> Option<(&str, Kind)> {
    match step {
        Step::Spin { flag, .. } | Step::Set(flag) | Step::Clear(flag) | Step::Add(flag) => {
            Some((flag, Kind::Flag))
        }
        Step::Lock(name) | Step::Unlock(name) => Some((name, Kind::Lock)),
        Step::Barrier(name) | Step::SleepingBarrier { name, .. } => Some((name, Kind::Barrier)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs(texts: &[&str]) -> Vec<Program> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn a_barrier_counts_the_vcpus_that_name_it() {
        let table = SharedTable::collect(&programs(&[
            "loop: barrier; barrier",
            "loop: barrier",
            "halt",
        ]))
        .unwrap();
        assert_eq!(table.get("barrier").unwrap().1.participants, 2);
    }

    #[test]
    fn names_get_places_in_order() {
        let table = SharedTable::collect(&programs(&["set b; lock", "spin a; set b"])).unwrap();
        let names: Vec<_> = table
            .objects()
            .iter()
            .map(|object| object.name.as_str())
            .collect();
        assert_eq!(names, ["b", "lock", "a"]);
    }

    #[test]
    fn a_name_has_one_meaning() {
        let error = SharedTable::collect(&programs(&["set x", "lock x; unlock x"])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`x` is a flag in one place and a lock in the program of vCPU 1: give one of them another name"
        );
    }

    #[test]
    fn the_table_is_bounded() {
        let text: Vec<_> = (0..=SHARED_OBJECTS).map(|n| format!("set f{n}")).collect();
        assert_eq!(
            SharedTable::collect(&programs(&[&text.join(";")])).unwrap_err(),
            SharedError::TooMany
        );
    }
}
