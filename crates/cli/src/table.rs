//! Output formats of lists: JSON for programs, tables for people at a terminal, names for shell loops.

use crate::failure::Failure;
use crate::output;
use clap::{Args, ValueEnum};
use std::io::IsTerminal as _;
use std::time::{SystemTime, UNIX_EPOCH};

/// Widest cell; longer text is cut. The names that it comes from are chosen by code in sandboxes.
const CELL_CHARS_MAX: usize = 100;

const BOLD: &str = "\x1b[1m";
const PLAIN: &str = "\x1b[0m";

/// Flags of commands that print a list.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct FormatArgs {
    /// Output format [default: table on a terminal, otherwise json]
    #[arg(long, short, value_enum, value_name = "FORMAT")]
    output: Option<Format>,

    /// The same as --output json
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

/// An output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// One JSON object
    Json,
    /// A table
    Table,
    /// A table with more columns
    Wide,
    /// Only the first column, one per line
    Name,
}

/// A column of a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    title: &'static str,
    /// Least width, so that rows that are printed one by one are aligned.
    width: usize,
    is_wide: bool,
}

/// Rows for people. Cells are printed without control characters.
#[derive(Debug)]
pub(crate) struct Table {
    columns: &'static [Column],
    rows: Vec<Vec<String>>,
}

// === impl FormatArgs ===

impl FormatArgs {
    pub(crate) fn chosen(self) -> Format {
        match (self.output, self.json) {
            (Some(format), _) => format,
            (None, true) => Format::Json,
            (None, false) if std::io::stdout().is_terminal() => Format::Table,
            (None, false) => Format::Json,
        }
    }

    /// Whether standard output is JSON.
    pub(crate) fn is_json(self) -> bool {
        self.chosen() == Format::Json
    }
}

// === impl Column ===

impl Column {
    /// In every table.
    pub(crate) const fn new(title: &'static str) -> Self {
        Self {
            title,
            width: title.len(),
            is_wide: false,
        }
    }

    /// Only with `-o wide`.
    pub(crate) const fn wide(title: &'static str) -> Self {
        Self {
            is_wide: true,
            ..Self::new(title)
        }
    }

    /// At least so wide.
    pub(crate) const fn at_least(self, width: usize) -> Self {
        Self { width, ..self }
    }
}

// === impl Table ===

impl Table {
    pub(crate) fn new(columns: &'static [Column]) -> Self {
        Self {
            columns,
            rows: Vec::new(),
        }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows
            .push(cells.iter().map(|cell| clean(cell)).collect());
    }

    /// Prints the table with its titles. `format` is not JSON.
    pub(crate) fn print(&self, format: Format) -> Result<(), Failure> {
        self.print_rows(format, true)
    }

    /// Prints the rows, after their titles if these are wanted.
    pub(crate) fn print_rows(&self, format: Format, has_titles: bool) -> Result<(), Failure> {
        let is_terminal = std::io::stdout().is_terminal();
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let text = self.render(format, has_titles, is_terminal && !no_color);
        output::text(text.as_bytes())
    }

    fn render(&self, format: Format, has_titles: bool, is_colored: bool) -> String {
        if format == Format::Name {
            let names = self.rows.iter().filter_map(|row| row.first());
            return names.map(|name| format!("{name}\n")).collect();
        }
        let shown: Vec<(usize, &Column)> = self
            .columns
            .iter()
            .enumerate()
            .filter(|(_, column)| !column.is_wide || format == Format::Wide)
            .collect();
        let width = |at: usize, column: &Column| {
            let cells = self.rows.iter().filter_map(|row| row.get(at));
            let widest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
            widest.max(column.width)
        };
        let widths: Vec<usize> = shown
            .iter()
            .map(|(at, column)| width(*at, column))
            .collect();
        let line = |cells: Vec<&str>| {
            let padded = cells.iter().zip(&widths).map(|(cell, width)| {
                let padding = width.saturating_sub(cell.chars().count());
                format!("{cell}{}", " ".repeat(padding))
            });
            let line: Vec<String> = padded.collect();
            line.join("  ").trim_end().to_owned()
        };
        let mut text = String::new();
        if has_titles {
            let titles = line(shown.iter().map(|(_, column)| column.title).collect());
            match is_colored {
                true => text.push_str(&format!("{BOLD}{titles}{PLAIN}\n")),
                false => text.push_str(&format!("{titles}\n")),
            }
        }
        for row in &self.rows {
            let cell = |at: usize| row.get(at).map_or("", String::as_str);
            let cells = shown.iter().map(|(at, _)| cell(*at)).collect();
            text.push_str(&format!("{}\n", line(cells)));
        }
        text
    }
}

/// One line without control characters, cut where it is too long.
fn clean(cell: &str) -> String {
    let chars = cell.chars();
    let plain = chars.map(|char| if char.is_control() { '?' } else { char });
    let text: String = plain.take(CELL_CHARS_MAX).collect();
    match (text.is_empty(), cell.chars().nth(CELL_CHARS_MAX).is_some()) {
        (true, _) => "-".to_owned(),
        (false, true) => format!("{text}…"),
        (false, false) => text,
    }
}

/// The time since a Unix time in seconds, in its largest unit; `-` for 0.
pub(crate) fn ago(unix_s: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
    if unix_s <= 0 {
        return "-".to_owned();
    }
    duration(now.saturating_sub(unix_s).max(0).unsigned_abs())
}

/// Seconds in their largest unit: `59s`, `3m`, `2h`, `9d`.
pub(crate) fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        86_400.. => format!("{}d", seconds / 86_400),
    }
}

/// A size in its largest unit: `512 B`, `1.5 MiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let (mut unit, mut at) = (1024u64, 0);
    while count / unit >= 1024 && at + 1 < UNITS.len() {
        unit *= 1024;
        at += 1;
    }
    let tenths = count % unit * 10 / unit;
    match tenths {
        0 => format!("{} {}", count / unit, UNITS[at]),
        tenths => format!("{}.{tenths} {}", count / unit, UNITS[at]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 3] = [
        Column::new("NAME"),
        Column::new("SIZE").at_least(6),
        Column::wide("OWNER"),
    ];

    #[test]
    fn a_table_is_aligned_and_clean() {
        let mut table = Table::new(&COLUMNS);
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        table.row(row(["a", "1 B", "local"]));
        table.row(row(["longer\x1b[2J\n", "", "x"]));
        assert_eq!(
            table.render(Format::Table, true, false),
            "NAME         SIZE\na            1 B\nlonger?[2J?  -\n"
        );
        assert_eq!(
            table.render(Format::Wide, false, false),
            "a            1 B     local\nlonger?[2J?  -       x\n"
        );
        assert_eq!(table.render(Format::Name, true, false), "a\nlonger?[2J?\n");
        let colored = table.render(Format::Table, true, true);
        assert!(
            colored.starts_with("\x1b[1mNAME         SIZE\x1b[0m\n"),
            "{colored:?}"
        );
        let mut long = Table::new(&COLUMNS);
        long.row(vec!["ü".repeat(500)]);
        assert_eq!(
            long.render(Format::Name, true, false).chars().count(),
            CELL_CHARS_MAX + 2
        );
    }

    #[test]
    fn times_and_sizes() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (7200, "2h"),
            (200_000, "2d"),
        ] {
            assert_eq!(duration(seconds), text);
        }
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (512 << 20, "512 MiB"),
            (u64::MAX, "16383.9 PiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
        assert_eq!(ago(0), "-");
        assert_eq!(ago(i64::MAX), "0s");
    }
}
