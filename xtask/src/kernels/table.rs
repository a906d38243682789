//! The committed table: one line a kernel and architecture, `NAME=NUMBER` after the names, so that a change is a line of
//! a difference that a person can judge.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result, bail};

use super::cubin::Counts;

/// Registers that another compile of nearly the same text may take more without being told.
const REGISTERS_MARGIN: u32 = 8;

const HEAD: &str = "\
# What the compiler makes of every kernel: registers of a thread, static shared memory of a block and spilled bytes of a
# thread (stores and loads), and how many instructions there are for tensor cores (`mma`, bf16), for loads of their
# operands from shared memory (`ldmatrix`) and for copies that run by themselves (`async`).
# Held by `cargo run -p xtask -- kernels`, written by it with `--update`.
";

/// One kernel on one architecture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Name of its text.
    pub source: String,
    /// Its name.
    pub kernel: String,
    /// For what it was compiled.
    pub architecture: String,
    registers: u32,
    shared: u32,
    spilled: u32,
    mma: u32,
    ldmatrix: u32,
    asynchronous: u32,
}

impl Figures {
    /// What orders the table: by text, kernel, and generation.
    pub fn key(&self) -> (String, String, u32) {
        let digits: String = self.architecture.chars().filter(char::is_ascii_digit).collect();
        (self.source.clone(), self.kernel.clone(), digits.parse().unwrap_or(0))
    }

    /// Takes over the counted instructions.
    pub fn count(&mut self, counts: &Counts) {
        self.mma = counts.mma;
        self.ldmatrix = counts.ldmatrix;
        self.asynchronous = counts.asynchronous;
    }

    fn fields(&mut self) -> [(&'static str, &mut u32); 6] {
        [
            ("registers", &mut self.registers),
            ("shared", &mut self.shared),
            ("spilled", &mut self.spilled),
            ("mma", &mut self.mma),
            ("ldmatrix", &mut self.ldmatrix),
            ("async", &mut self.asynchronous),
        ]
    }

    fn text(&self) -> String {
        let mut line = format!("{} {} {}", self.source, self.kernel, self.architecture);
        for (name, value) in self.clone().fields() {
            let is_always_told = matches!(name, "registers" | "shared" | "spilled");
            if is_always_told || *value > 0 {
                write!(line, " {name}={value}").expect("a string takes text");
            }
        }
        line
    }

    fn parse(line: &str) -> Result<Figures> {
        let mut words = line.split_whitespace();
        let mut word = || words.next().map(str::to_owned).with_context(|| format!("a short line: {line:?}"));
        let mut figures =
            Figures { source: word()?, kernel: word()?, architecture: word()?, ..Figures::default() };
        for word in words {
            let (name, value) = word.split_once('=').with_context(|| format!("{word:?} in {line:?}"))?;
            let mut fields = figures.fields();
            let field = fields.iter_mut().find(|(known, _)| *known == name);
            let (_, field) = field.with_context(|| format!("unknown figure {name:?} in {line:?}"))?;
            **field = value.parse().with_context(|| format!("{word:?} in {line:?}"))?;
        }
        Ok(figures)
    }

    /// What is worse in `found` than here.
    fn faults(&self, found: &Figures) -> Vec<String> {
        let mut faults = Vec::new();
        let mut more = |what: &str, before: u32, now: u32, margin: u32| {
            if now > before + margin {
                faults.push(format!("{now} {what}, {before} before"));
            }
        };
        more("registers", self.registers, found.registers, REGISTERS_MARGIN);
        more("bytes of shared memory", self.shared, found.shared, 0);
        more("bytes spilled", self.spilled, found.spilled, 0);
        let mut fewer = |what: &str, before: u32, now: u32| {
            if now < before {
                faults.push(format!("{now} {what}, {before} before"));
            }
        };
        fewer("tensor-core instructions", self.mma, found.mma);
        fewer("ldmatrix instructions", self.ldmatrix, found.ldmatrix);
        fewer("asynchronous copies", self.asynchronous, found.asynchronous);
        faults
    }
}

/// All kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Of the compiler.
    pub version: String,
    /// In the order of their keys.
    pub rows: Vec<Figures>,
}

impl Table {
    /// As committed.
    pub fn text(&self) -> String {
        let mut text = format!("{HEAD}nvrtc {}\n", self.version);
        for row in &self.rows {
            text += &row.text();
            text.push('\n');
        }
        text
    }

    /// From a committed one.
    pub fn parse(text: &str) -> Result<Table> {
        let mut lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let first = lines.next().unwrap_or_default();
        let version = first.strip_prefix("nvrtc ").with_context(|| format!("no version: {first:?}"))?;
        Ok(Table { version: version.into(), rows: lines.map(Figures::parse).collect::<Result<_>>()? })
    }

    /// What `found` has worse, or more, or less than this table.
    pub fn faults(&self, found: &Table) -> Vec<String> {
        if self.version != found.version {
            return vec![format!(
                "the table was made with NVRTC {}, this is {}",
                self.version, found.version
            )];
        }
        let name = |row: &Figures| format!("{} {} {}", row.source, row.kernel, row.architecture);
        let mut before: BTreeMap<String, &Figures> = self.rows.iter().map(|row| (name(row), row)).collect();
        let mut faults = Vec::new();
        for row in &found.rows {
            match before.remove(&name(row)) {
                None => faults.push(format!("{}: not in the table", name(row))),
                Some(known) => {
                    faults
                        .extend(known.faults(row).into_iter().map(|fault| format!("{}: {fault}", name(row))));
                }
            }
        }
        faults.extend(before.into_keys().map(|name| format!("{name}: in the table, and no kernel")));
        faults
    }
}

/// The number before `what` in a line.
fn number_before(line: &str, what: &str) -> Option<u32> {
    let (before, _) = line.split_once(what)?;
    before.split_whitespace().next_back()?.parse().ok()
}

/// What the assembler said about each kernel of a text.
pub fn from_log(source: &str, architecture: &str, log: &str) -> Result<Vec<Figures>> {
    let mut all: Vec<Figures> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            let (source, architecture) = (source.to_owned(), architecture.to_owned());
            all.push(Figures { source, kernel, architecture, ..Figures::default() });
            continue;
        }
        let Some(last) = all.last_mut() else { continue };
        if let Some(stores) = number_before(line, " bytes spill stores") {
            last.spilled = stores + number_before(line, " bytes spill loads").unwrap_or(0);
        }
        if let Some(registers) = number_before(line, " registers") {
            last.registers = registers;
            last.shared = number_before(line, " bytes smem").unwrap_or(0);
        }
    }
    if let Some(silent) = all.iter().find(|figures| figures.registers == 0) {
        bail!("the compiler's log does not say the registers of {}:\n{log}", silent.kernel);
    }
    if all.is_empty() {
        bail!("no kernel in {source}.cu:\n{log}");
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_80'
ptxas info    : Function properties for b
    8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers, 380 bytes cmem[0]
";

    fn table() -> Table {
        let mut rows = from_log("x", "sm_80", LOG).expect("a log");
        rows[1].count(&Counts { mma: 4, ldmatrix: 2, asynchronous: 0 });
        rows.sort_by_key(Figures::key);
        Table { version: "13.5".into(), rows }
    }

    #[test]
    fn a_table_is_read_as_it_was_written() {
        let text = table().text();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            lines,
            [
                "nvrtc 13.5",
                "x a sm_80 registers=16 shared=0 spilled=0 mma=4 ldmatrix=2",
                "x b sm_80 registers=40 shared=128 spilled=16",
            ]
        );
        assert_eq!(Table::parse(&text).expect("reads"), table());
        assert!(Table::parse("nvrtc 13.5\nx a sm_80 colour=1\n").is_err());
    }

    #[test]
    fn what_got_worse_is_told() {
        let (before, mut now) = (table(), table());
        assert!(before.faults(&now).is_empty());
        now.rows[0].registers += REGISTERS_MARGIN;
        assert!(before.faults(&now).is_empty(), "within the margin");
        now.rows[0].registers += 1;
        now.rows[0].mma = 3;
        now.rows[1].spilled = 17;
        now.rows[1].shared = 256;
        assert_eq!(
            before.faults(&now),
            [
                "x a sm_80: 25 registers, 16 before",
                "x a sm_80: 3 tensor-core instructions, 4 before",
                "x b sm_80: 256 bytes of shared memory, 128 before",
                "x b sm_80: 17 bytes spilled, 16 before",
            ]
        );
        let mut other = table();
        other.rows[0].kernel = "c".into();
        assert_eq!(
            before.faults(&other),
            ["x c sm_80: not in the table", "x a sm_80: in the table, and no kernel"]
        );
        other.version = "12.9".into();
        assert_eq!(before.faults(&other), ["the table was made with NVRTC 13.5, this is 12.9"]);
    }

    #[test]
    fn a_log_that_says_too_little_is_refused() {
        assert!(from_log("x", "sm_80", "").is_err());
        assert!(from_log("x", "sm_80", "Compiling entry function 'a' for 'sm_80'").is_err());
    }
}
