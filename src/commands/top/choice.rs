// SPDX-License-Identifier: GPL-2.0-only
//! What the user of `cohort top` has chosen to see, and the file that keeps it between runs. Not for what lasts as long as
//! the program: the filter, the page, VMs that are open.

use super::model::Order;
use crate::text::columns::Column;
use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// What stands above the names.
const NAME: &str = "VM";

/// Which columns are shown, and by what rows are sorted.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Choice {
    /// Columns that are not shown.
    pub hidden: Vec<Column>,
    /// By what rows are sorted.
    pub order: Order,
    /// The other way round.
    pub reversed: bool,
}

/// All columns, the VM that waits most first.
impl Default for Choice {
    fn default() -> Self {
        Self {
            hidden: Vec::new(),
            order: Order::By(Column::Ready),
            reversed: false,
        }
    }
}

/// As it stands in the file: columns by what stands above them.
#[derive(Deserialize, Serialize)]
#[serde(default)]
struct Written {
    sorted_by: String,
    reversed: bool,
    hidden: Vec<String>,
}

impl Default for Written {
    fn default() -> Self {
        Self::from(&Choice::default())
    }
}

impl From<&Choice> for Written {
    fn from(choice: &Choice) -> Self {
        let heading = |column: &Column| column.heading().to_owned();
        Self {
            sorted_by: match choice.order {
                Order::Name => NAME.to_owned(),
                Order::By(column) => heading(&column),
            },
            reversed: choice.reversed,
            hidden: choice.hidden.iter().map(heading).collect(),
        }
    }
}

impl From<Written> for Choice {
    /// Columns that this version does not have are left out.
    fn from(written: Written) -> Self {
        let column = |heading: &String| {
            let mut all = Column::ALL.into_iter();
            all.find(|column| column.heading() == heading)
        };
        let order = match written.sorted_by == NAME {
            true => Order::Name,
            false => column(&written.sorted_by).map_or(Self::default().order, Order::By),
        };
        Self {
            hidden: written.hidden.iter().filter_map(column).collect(),
            order,
            reversed: written.reversed,
        }
    }
}

/// Where this user's choice is kept; `None` for a user without a home.
pub fn file() -> Option<PathBuf> {
    path(env::var_os("XDG_STATE_HOME"), env::home_dir())
}

/// As the XDG Base Directory Specification has it: a state folder that is no absolute path does not count.
fn path(state: Option<OsString>, home: Option<PathBuf>) -> Option<PathBuf> {
    let state = state.map(PathBuf::from);
    let state = state.filter(|folder| folder.is_absolute());
    let state = state.or_else(|| Some(home?.join(".local/state")))?;
    Some(state.join("cohort/top.toml"))
}

/// What was chosen before; the default if nothing was.
///
/// # Errors
/// When there is a file that cannot be read or understood.
pub fn read(path: &Path) -> Result<Choice> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Choice::default()),
        text => text.with_context(|| {
            let path = path.display();
            format!("which columns to show cannot be read from {path}, so all are shown")
        })?,
    };
    let written: Written = toml::from_str(&text).map_err(|error| {
        anyhow!(
            "which columns to show cannot be understood from {}, so all are shown, and the next choice replaces the file: {}",
            path.display(),
            error.message()
        )
    })?;
    Ok(written.into())
}

/// Keeps `choice` for the next run. The file is there as a whole or not at all.
///
/// # Errors
/// When it cannot be written.
pub fn write(path: &Path, choice: &Choice) -> Result<()> {
    let sentence = || format!("which columns to show cannot be kept in {}", path.display());
    let text = toml::to_string(&Written::from(choice)).with_context(sentence)?;
    let folder = path.parent().with_context(sentence)?;
    let replace = || -> std::io::Result<()> {
        fs::create_dir_all(folder)?;
        let mut file = NamedTempFile::new_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.persist(path)?;
        Ok(())
    };
    replace().with_context(sentence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_kept_and_columns_of_other_versions_do_not_matter() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let path = folder.path().join("new/cohort/top.toml");
        assert_eq!(read(&path).expect("none is no error"), Choice::default());
        let choice = Choice {
            hidden: vec![Column::Halted, Column::Poll],
            order: Order::Name,
            reversed: true,
        };
        write(&path, &choice).expect("its folder can be made");
        assert_eq!(read(&path).expect("it is there"), choice);
        let other = Choice {
            order: Order::By(Column::Spins),
            ..Choice::default()
        };
        write(&path, &other).expect("it can be replaced");
        assert_eq!(read(&path).expect("it is there"), other);

        fs::write(
            &path,
            "sorted_by = \"%NEW\"\nhidden = [\"%NEW\", \"%HALT\"]\nnew = 1\n",
        )
        .expect("it can be written");
        let choice = read(&path).expect("it is sound");
        assert_eq!(choice.hidden, [Column::Halted]);
        assert_eq!(choice.order, Order::By(Column::Ready));
    }

    #[test]
    fn a_file_that_is_wrong_is_named() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let path = folder.path().join("top.toml");
        for content in [&b"hidden = 1"[..], b"x", &[0xff, 0xfe]] {
            fs::write(&path, content).expect("it can be written");
            let error = read(&path).expect_err("it is wrong").to_string();
            assert!(error.contains("top.toml"), "{error}");
        }
        assert!(read(folder.path()).is_err(), "a folder is no file");
        let below_a_file = path.join("top.toml");
        assert!(write(&below_a_file, &Choice::default()).is_err());
    }

    #[test]
    fn it_lies_where_the_user_keeps_state() {
        let of = |state: Option<&str>, home: Option<&str>| {
            path(state.map(OsString::from), home.map(PathBuf::from))
        };
        let home = Some("/home/a");
        let below = |folder: &str| Some(Path::new(folder).join("cohort/top.toml"));
        assert_eq!(of(Some("/state"), home), below("/state"));
        assert_eq!(of(None, home), below("/home/a/.local/state"));
        assert_eq!(of(Some(""), home), below("/home/a/.local/state"));
        assert_eq!(of(None, None), None);
    }
}
