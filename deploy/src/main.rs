// SPDX-License-Identifier: GPL-2.0-only
//! `cohort-deploy FOLDER` writes what installations have besides the program and that is made from its command line: man
//! pages to `FOLDER/man`, completions for shells to `FOLDER/completions`. `make build` calls it.

#[cfg(test)]
mod kubernetes;
#[cfg(test)]
mod packaging;

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::{Shell, generate_to};
use clap_mangen::Man;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// Programs that only root is likely to need.
const SECTION: &str = "8";
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Fish, Shell::Zsh];

fn main() -> Result<()> {
    let folder = env::args_os().nth(1).map(PathBuf::from);
    let folder = folder.context("say which folder: cohort-deploy FOLDER")?;
    write_man_pages(&folder.join("man"))?;
    write_completions(&folder.join("completions"))
}

/// A page for the program and one for each subcommand.
fn write_man_pages(folder: &Path) -> Result<()> {
    make(folder)?;
    // Before it is built, or there would be pages for `help`, too.
    let mut command = cohort::cli::command().disable_help_subcommand(true);
    command.build();
    let subcommands = command.get_subcommands().cloned();
    for command in subcommands.chain([command.clone()]) {
        let page = folder.join(format!("{}.{SECTION}", page_name(&command)));
        let mut text = Vec::new();
        let man = Man::new(command).section(SECTION).manual("Cohort");
        man.render(&mut text).context("a page cannot be made")?;
        fs::write(&page, text).with_context(|| page.display().to_string())?;
    }
    Ok(())
}

/// `cohort`, `cohort-run` and so on.
fn page_name(command: &Command) -> &str {
    let name = command.get_display_name();
    name.unwrap_or_else(|| command.get_name())
}

fn write_completions(folder: &Path) -> Result<()> {
    make(folder)?;
    for shell in SHELLS {
        let mut command = cohort::cli::command();
        generate_to(shell, &mut command, "cohort", folder)
            .with_context(|| format!("completions for {shell}"))?;
    }
    Ok(())
}

/// Makes `folder` anew: what an earlier version wrote is gone.
fn make(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cohort::process::exit::Exit;

    #[test]
    fn each_subcommand_has_a_page_with_its_options_and_exit_codes() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        write_man_pages(folder.path()).expect("pages can be written");
        let mut command = cohort::cli::command();
        command.build();
        let mut pages = 0;
        for subcommand in command.get_subcommands() {
            let name = subcommand.get_name();
            if name == "help" {
                continue;
            }
            let page = folder.path().join(format!("cohort-{name}.8"));
            // In roff a dash that is to stay one is escaped.
            let text = fs::read_to_string(page).expect(name).replace('\\', "");
            for option in subcommand.get_arguments().filter_map(|arg| arg.get_long()) {
                assert!(text.contains(&format!("--{option}")), "{name}: {option}");
            }
            let last = Exit::Unfit;
            assert!(
                text.contains(&format!("{}  {}", last.code(), last.meaning())),
                "{name}"
            );
            pages += 1;
        }
        let written = fs::read_dir(folder.path()).expect("it is there").count();
        assert_eq!(
            written,
            pages + 1,
            "the program has one, too, and nothing else"
        );
    }

    #[test]
    fn each_shell_completes_subcommands_and_their_options() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        write_completions(folder.path()).expect("completions can be written");
        for name in ["cohort.bash", "cohort.fish", "_cohort"] {
            let text = fs::read_to_string(folder.path().join(name)).expect(name);
            for word in ["compare", "ready-wait"] {
                assert!(text.contains(word), "{name}: {word}");
            }
        }
    }
}
