//! Where compiled kernels are kept between runs. This crate touches no file: whoever opens a GPU hands in a store, and
//! [`MemoryStore`] is the one that forgets everything when the process ends.
//!
//! A key names the content (text, options, architecture, compiler version), so what is stored under it never changes
//! and a store needs no invalidation. A store may lose entries at any time; what it returns is checked by loading it.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};

/// Compiled kernels by key. Keys are file names: ASCII letters, digits, `-`, `_` and `.`.
pub trait KernelStore: Send + Sync + Debug {
    /// What was saved under this key, whole; None where there is nothing, or what is there is damaged.
    fn load(&self, key: &str) -> Option<Vec<u8>>;

    /// Keeps an entry, whole or not at all, in place of what was there. Failing is no error: it is compiled again.
    fn save(&self, key: &str, bytes: &[u8]);

    /// Held from a failed `load` to the `save`, so that the ranks of a process that share this store compile each text
    /// once, and not each of them at the same time.
    fn turn(&self) -> &Mutex<()>;
}

/// A store of this process only.
#[derive(Debug, Default)]
pub struct MemoryStore {
    entries: Mutex<HashMap<String, Vec<u8>>>,
    turn: Mutex<()>,
}

impl KernelStore for MemoryStore {
    fn load(&self, key: &str) -> Option<Vec<u8>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    fn save(&self, key: &str, bytes: &[u8]) {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_owned(), bytes.to_owned());
    }

    fn turn(&self) -> &Mutex<()> {
        &self.turn
    }
}

/// The name under which a compiled text is kept: what it is called, for what it was compiled, by which compiler, and a
/// hash of everything that the compiler was given.
pub fn key(name: &str, text: &str, options: &[String], architecture: &str, compiler: (i32, i32)) -> String {
    let mut hash = Fnv128::default();
    for part in std::iter::once(text).chain(options.iter().map(String::as_str)) {
        hash.write(&(part.len() as u64).to_le_bytes());
        hash.write(part.as_bytes());
    }
    format!("{name}-{architecture}-nvrtc{}.{}-{:032x}", compiler.0, compiler.1, hash.0)
}

/// FNV-1a over 128 bits (Fowler, Noll, Vo): not against an adversary, but far too wide to collide by chance.
struct Fnv128(u128);

impl Default for Fnv128 {
    fn default() -> Self {
        Fnv128(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Fnv128 {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_where_anything_that_is_compiled_differs() {
        let of = |text: &str, options: &[&str], architecture: &str, compiler| {
            let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
            key("norm", text, &options, architecture, compiler)
        };
        let first = of("ab", &["c"], "sm_80", (13, 5));
        assert_eq!(first, of("ab", &["c"], "sm_80", (13, 5)));
        let others = [
            of("a", &["bc"], "sm_80", (13, 5)),
            of("ab", &[], "sm_80", (13, 5)),
            of("ab", &["", "c"], "sm_80", (13, 5)),
            of("ab", &["c"], "sm_90a", (13, 5)),
            of("ab", &["c"], "sm_80", (13, 6)),
        ];
        for (i, other) in others.iter().enumerate() {
            assert!(*other != first && !others[..i].contains(other), "{other}");
        }
        assert!(first.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)), "{first}");
    }

    #[test]
    fn the_hash_is_the_published_one() {
        // FNV-1a 128 of "a", from the reference test vectors.
        let mut hash = Fnv128::default();
        hash.write(b"a");
        assert_eq!(hash.0, 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }

    #[test]
    fn memory_keeps_the_last_value() {
        let store = MemoryStore::default();
        assert_eq!(store.load("x"), None);
        store.save("x", &[1]);
        store.save("x", &[2, 3]);
        assert_eq!(store.load("x"), Some(vec![2, 3]));
    }
}
