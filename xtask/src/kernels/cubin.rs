//! Instructions of machine code for GPUs from Volta on: an ELF file of 64 bits with a section `.text.NAME` for each
//! kernel, instructions of 16 bytes whose lowest 12 bits say what they are. The numbers below are those that NVIDIA's
//! disassembler shows for sm_80, sm_90a and sm_100a.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

const INSTRUCTION_BYTES: usize = 16;
/// HMMA: products of bf16 fragments on tensor cores.
const MMA: u16 = 0x23c;
/// LDSM: `ldmatrix`.
const LDMATRIX: u16 = 0x83b;
/// LDGSTS: `cp.async`.
const ASYNCHRONOUS: u16 = 0xfae;

/// How many there are of the instructions that make a kernel fast.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tensor-core products of 16-bit floats.
    pub mma: u32,
    /// Loads of fragments from shared memory.
    pub ldmatrix: u32,
    /// Copies from global to shared memory that run by themselves.
    pub asynchronous: u32,
}

impl Counts {
    fn of(code: &[u8]) -> Counts {
        let mut counts = Counts::default();
        for instruction in code.chunks_exact(INSTRUCTION_BYTES) {
            match u16::from_le_bytes([instruction[0], instruction[1]]) & 0xfff {
                MMA => counts.mma += 1,
                LDMATRIX => counts.ldmatrix += 1,
                ASYNCHRONOUS => counts.asynchronous += 1,
                _ => {}
            }
        }
        counts
    }
}

fn bytes(file: &[u8], start: usize, count: usize) -> Result<&[u8]> {
    let end = start.checked_add(count).context("an offset past the end")?;
    file.get(start..end).with_context(|| format!("{count} bytes at {start} of {}", file.len()))
}

fn number(file: &[u8], start: usize, count: usize) -> Result<usize> {
    let mut value = [0; 8];
    value[..count].copy_from_slice(bytes(file, start, count)?);
    usize::try_from(u64::from_le_bytes(value)).context("a number past an address")
}

/// Counts by kernel.
pub fn instructions(file: &[u8]) -> Result<BTreeMap<String, Counts>> {
    ensure!(file.starts_with(b"\x7fELF\x02\x01"), "no ELF file of 64 bits");
    // Offsets of the ELF header and of a section's entry in the specification of ELF64.
    let (sections, entry_bytes) = (number(file, 0x28, 8)?, number(file, 0x3a, 2)?);
    let (count, names) = (number(file, 0x3c, 2)?, number(file, 0x3e, 2)?);
    let section = |i: usize| -> Result<(usize, &[u8])> {
        let entry = sections + i * entry_bytes;
        bytes(file, entry, entry_bytes).context("a section's entry")?;
        let (start, size) = (number(file, entry + 0x18, 8)?, number(file, entry + 0x20, 8)?);
        // Sections without contents in the file (shared memory) have a size all the same.
        let is_empty = number(file, entry + 4, 4)? == 8;
        Ok((number(file, entry, 4)?, if is_empty { &[] } else { bytes(file, start, size)? }))
    };
    let (_, names) = section(names)?;
    let mut all = BTreeMap::new();
    for i in 0..count {
        let (name, code) = section(i)?;
        let name: Vec<u8> = names.iter().skip(name).take_while(|byte| **byte != 0).copied().collect();
        if let Some(kernel) = String::from_utf8_lossy(&name).strip_prefix(".text.") {
            all.insert(kernel.to_owned(), Counts::of(code));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with the sections of names and `.text.k`.
    fn file(code: &[u8]) -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01".to_vec();
        file.resize(64, 0);
        let names = b"\0.text.k\0";
        let (names_at, code_at) = (64, 64 + names.len());
        let sections = code_at + code.len();
        file.extend(names);
        file.extend(code);
        for (name, start, size) in [(0usize, names_at, names.len()), (1, code_at, code.len())] {
            let mut entry = vec![0; 64];
            entry[..4].copy_from_slice(&(name as u32).to_le_bytes());
            entry[0x18..0x20].copy_from_slice(&(start as u64).to_le_bytes());
            entry[0x20..0x28].copy_from_slice(&(size as u64).to_le_bytes());
            file.extend(entry);
        }
        file[0x28..0x30].copy_from_slice(&(sections as u64).to_le_bytes());
        file[0x3a..0x3c].copy_from_slice(&64u16.to_le_bytes());
        file[0x3c..0x3e].copy_from_slice(&2u16.to_le_bytes());
        file
    }

    #[test]
    fn instructions_are_counted_by_their_lowest_bits() {
        let mut code = Vec::new();
        for word in [0x723cu16, 0x723c, 0x783b, 0x7fae, 0x0fae, 0x3c72, 0x0000] {
            code.extend(word.to_le_bytes());
            code.extend([0x3c; 14]);
        }
        let counts = instructions(&file(&code)).expect("a file");
        assert_eq!(counts.len(), 1);
        assert_eq!(counts["k"], Counts { mma: 2, ldmatrix: 1, asynchronous: 2 });
    }

    #[test]
    fn damaged_files_are_refused() {
        assert!(instructions(b"PTX").is_err());
        let whole = file(&[0; 16]);
        for end in 6..whole.len() {
            assert!(instructions(&whole[..end]).is_err(), "{end} of {}", whole.len());
        }
    }
}
