//! The page, and the files that it shows.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use crate::support::cli::{Failure, failed_to};

/// A page in the making: sections in order, tables as CSV files, pictures as SVG files.
pub struct Report {
    folder: PathBuf,
    page: String,
    left_out: Vec<String>,
}

/// Tables of more rows are shown by their file alone.
const SHOWN_ROWS: usize = 32;

impl Report {
    /// An empty page in `folder`, which is made.
    pub fn new(folder: &Path, title: &str) -> Result<Self, Failure> {
        fs::create_dir_all(folder).map_err(failed_to("make", folder))?;
        Ok(Self { folder: folder.to_owned(), page: format!("# {title}\n"), left_out: Vec::new() })
    }

    /// A heading, and how to read what follows.
    pub fn section(&mut self, title: &str, reading: &str) {
        let _ = write!(self.page, "\n## {title}\n\n{reading}\n");
    }

    pub fn say(&mut self, text: impl AsRef<str>) {
        let _ = write!(self.page, "\n{}\n", text.as_ref());
    }

    /// What the model has not, and why.
    pub fn leave_out(&mut self, what: &str, why: &str) {
        self.left_out.push(format!("* {what}: {why}"));
    }

    /// Writes `name.csv`, and shows it where it is short.
    pub fn table(&mut self, name: &str, header: &[&str], rows: &[Vec<String>]) -> Result<(), Failure> {
        let path = self.folder.join(name).with_extension("csv");
        let lines: String = rows.iter().map(|row| row.join(",") + "\n").collect();
        fs::write(&path, header.join(",") + "\n" + &lines).map_err(failed_to("write", &path))?;
        if rows.len() <= SHOWN_ROWS {
            let rule = vec!["---"; header.len()].join(" | ");
            let _ = write!(self.page, "\n| {} |\n| {rule} |\n", header.join(" | "));
            rows.iter().for_each(|row| self.page.push_str(&format!("| {} |\n", row.join(" | "))));
        }
        let _ = write!(self.page, "\nNumbers: [{name}.csv]({name}.csv)\n");
        Ok(())
    }

    /// Draws `name.svg` and shows it.
    pub fn picture(
        &mut self,
        name: &str,
        caption: &str,
        draw: impl FnOnce(&Path) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        draw(&self.folder.join(name).with_extension("svg"))?;
        let _ = write!(self.page, "\n![{caption}]({name}.svg)\n");
        Ok(())
    }

    /// Writes the page; returns its path.
    pub fn finish(mut self) -> Result<PathBuf, Failure> {
        if !self.left_out.is_empty() {
            let _ = write!(self.page, "\n## Left out\n\n{}\n", self.left_out.join("\n"));
        }
        let path = self.folder.join("report.md");
        fs::write(&path, self.page).map_err(failed_to("write", &path))?;
        Ok(path)
    }
}

/// A number of a table.
pub fn number(value: f64) -> String {
    if value.is_nan() { String::new() } else { format!("{value:.6}") }
}
