//! What the processes of a job agree on outside of their runs: rank 0 decides and tells the others, every process does its
//! part and hears of the first that failed, and what has to be alike is compared. With all ranks in one process nothing
//! is exchanged.

use std::collections::BTreeMap;
use std::time::Duration;

use plica_comm::launch::Backend;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Another process has failed, and says why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stopped, because rank {rank} failed first: {text}")]
pub struct Elsewhere {
    /// Its rank.
    pub rank: usize,
    /// Its message.
    pub text: String,
}

/// The processes of a job, before and after their runs.
#[derive(Clone, Debug)]
pub struct Agreement<'a> {
    /// What runs the ranks.
    pub backend: &'a Backend,
    /// How long a process waits for the others.
    pub limit: Duration,
}

/// What a process tells the others.
type Told<T> = Result<T, String>;

impl Agreement<'_> {
    /// Rank 0 decides; every process gets its decision.
    ///
    /// # Errors
    /// Rank 0 could not decide (the others get [`Elsewhere`]), or a process does not come.
    pub fn decide<T: Serialize + DeserializeOwned>(
        &self,
        what: &str,
        decide: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let Backend::Processes(processes) = self.backend else { return decide() };
        let own = (processes.rank() == 0).then(decide);
        let told: Option<Told<&T>> = own.as_ref().map(|made| match made {
            Ok(value) => Ok(value),
            Err(error) => Err(format!("{error:#}")),
        });
        let bytes = told.map_or(Ok(Vec::new()), |told| serde_json::to_vec(&told))?;
        let decided = processes.consult(what, &bytes, self.limit, |mut all| all.swap_remove(0))?;
        match own {
            Some(own) => own,
            None => match serde_json::from_slice::<Told<T>>(&decided)? {
                Ok(value) => Ok(value),
                Err(text) => Err(Elsewhere { rank: 0, text }.into()),
            },
        }
    }

    /// Every process does its part.
    ///
    /// # Errors
    /// One of them could not: it gets its own error, the others hear of the first. Where several say the same, the
    /// first alone does.
    pub fn everyone<T>(&self, what: &str, part: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        let Backend::Processes(processes) = self.backend else { return part() };
        let own = part();
        let own_text = own.as_ref().err().map(|error| format!("{error:#}"));
        let said = serde_json::to_vec(&own_text)?;
        let answer = processes.consult(what, &said, self.limit, |all| answer(first_failure(&all)))?;
        match serde_json::from_slice::<Option<(usize, String)>>(&answer)? {
            None => own,
            Some((rank, text))
                if own_text.is_none() || (rank != processes.rank() && own_text == Some(text.clone())) =>
            {
                Err(Elsewhere { rank, text }.into())
            }
            Some(_) => own,
        }
    }

    /// Checks that every process has the same text, a table in TOML or anything else.
    ///
    /// # Errors
    /// One that differs is named with what differs first: it gets the error, the others [`Elsewhere`].
    pub fn alike(&self, what: &str, own: &str) -> anyhow::Result<()> {
        let Backend::Processes(processes) = self.backend else { return Ok(()) };
        // Digests travel to rank 0; texts only where some differ, and only of the two ranks that are compared.
        let own_digest = digest(own).to_le_bytes();
        let differ = processes.consult(what, &own_digest, self.limit, |all| answer(odd_one(&all)))?;
        let Some(odd) = serde_json::from_slice::<Option<OddOne>>(&differ)? else { return Ok(()) };
        let is_compared = [odd.rank, odd.common[0]].contains(&processes.rank());
        let own_bytes = if is_compared { own.as_bytes() } else { &[] };
        let text = processes.consult(what, own_bytes, self.limit, |all| {
            let text = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
            difference(what, &odd, &text(odd.rank), &text(odd.common[0])).into_bytes()
        })?;
        let text = String::from_utf8_lossy(&text).into_owned();
        if odd.rank == processes.rank() {
            return Err(anyhow::anyhow!("{text}"));
        }
        Err(Elsewhere { rank: odd.rank, text }.into())
    }
}

/// Rank 0's answer as bytes.
fn answer<T: Serialize>(value: T) -> Vec<u8> {
    serde_json::to_vec(&value).expect("texts and numbers are JSON")
}

/// The first rank that has told a failure.
fn first_failure(all: &[Vec<u8>]) -> Option<(usize, String)> {
    let told = |bytes: &Vec<u8>| {
        serde_json::from_slice::<Option<String>>(bytes).unwrap_or_else(|e| Some(e.to_string()))
    };
    all.iter().enumerate().find_map(|(rank, bytes)| Some((rank, told(bytes)?)))
}

/// 64 bits of a text (FNV-1a): enough to tell apart what people mistype.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// A rank whose text differs, and the ranks that have the common one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
struct OddOne {
    rank: usize,
    common: Vec<usize>,
}

/// Most ranks that a message lists.
const RANKS_LISTED: usize = 16;

/// The first rank whose digest is not that of most ranks (of rank 0, where no digest has more).
fn odd_one(digests: &[Vec<u8>]) -> Option<OddOne> {
    let mut ranks_of: BTreeMap<&Vec<u8>, Vec<usize>> = BTreeMap::new();
    for (rank, digest) in digests.iter().enumerate() {
        ranks_of.entry(digest).or_default().push(rank);
    }
    // The first of the largest: rank numbers decide between equal ones.
    let common = ranks_of.values().max_by_key(|ranks| (ranks.len(), std::cmp::Reverse(ranks[0])))?;
    let rank = ranks_of.values().filter(|ranks| *ranks != common).map(|ranks| ranks[0]).min()?;
    Some(OddOne { rank, common: common.clone() })
}
/// Most settings that a message about different configurations lists.
const LISTED: usize = 3;

/// What differs between the odd rank's text and the common one.
fn difference(what: &str, odd: &OddOne, mine: &str, theirs: &str) -> String {
    let (rank, common) = (odd.rank, odd.common[0]);
    let mut ranks: Vec<String> = odd.common.iter().take(RANKS_LISTED).map(|rank| rank.to_string()).collect();
    if odd.common.len() > RANKS_LISTED {
        ranks.push(format!("and {} more", odd.common.len() - RANKS_LISTED));
    }
    let (mine, theirs) = (settings(mine), settings(theirs));
    let keys: std::collections::BTreeSet<&String> = mine.keys().chain(theirs.keys()).collect();
    let shown = |value: Option<&String>| value.map_or("not set", String::as_str).to_string();
    let different: Vec<String> = keys
        .into_iter()
        .filter(|key| mine.get(*key) != theirs.get(*key))
        .map(|key| {
            let (mine, theirs) = (shown(mine.get(key)), shown(theirs.get(key)));
            format!("{key} = {mine} on rank {rank}, {theirs} on rank {common}")
        })
        .collect();
    let mut text = format!(
        "the {what} of rank {rank} is not that of rank(s) {}: {}",
        ranks.join(", "),
        different[..different.len().min(LISTED)].join("; ")
    );
    if different.len() > LISTED {
        text.push_str(&format!("; and {} more", different.len() - LISTED));
    }
    format!("{text}; every rank needs the same")
}

/// Settings of a table in TOML by their full names; a text that is none under one name.
fn settings(text: &str) -> BTreeMap<String, String> {
    fn walk(prefix: &str, value: &toml::Value, all: &mut BTreeMap<String, String>) {
        match value {
            toml::Value::Table(table) => {
                for (key, value) in table {
                    let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                    walk(&name, value, all);
                }
            }
            value => {
                all.insert(prefix.to_string(), value.to_string());
            }
        }
    }
    let mut all = BTreeMap::new();
    match text.parse::<toml::Table>() {
        Ok(table) => walk("", &toml::Value::Table(table), &mut all),
        Err(_) => {
            all.insert("it".into(), text.to_string());
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn odd(all: &[&str]) -> Option<(usize, String)> {
        let digests: Vec<Vec<u8>> = all.iter().map(|text| digest(text).to_le_bytes().to_vec()).collect();
        let odd = odd_one(&digests)?;
        Some((odd.rank, difference("configuration", &odd, all[odd.rank], all[odd.common[0]])))
    }

    #[test]
    fn the_rank_that_differs_is_named_with_the_first_settings_that_do() {
        let one = "[train]\nlr = 0.001\nwarmup = 3\n[run]\nname = 'a'\n";
        let two = "[train]\nlr = 0.002\nwarmup = 3\n[run]\nname = 'a'\n";
        assert_eq!(odd(&[one, one, one]), None);
        let (rank, text) = odd(&[one, one, two, one]).expect("rank 2 differs");
        assert_eq!(rank, 2);
        assert_eq!(
            text,
            "the configuration of rank 2 is not that of rank(s) 0, 1, 3: train.lr = 0.002 on rank 2, 0.001 on rank 0; \
             every rank needs the same"
        );
        let (rank, text) = odd(&[two, one, one]).expect("rank 0 differs");
        assert!(rank == 0 && text.contains("train.lr = 0.002 on rank 0, 0.001 on rank 1"), "{text}");
        let (rank, _) = odd(&[one, two]).expect("they differ");
        assert_eq!(rank, 1, "of two the second");
        let (_, text) = odd(&[one, "[train]\nlr = 0.001\n"]).expect("settings are missing");
        assert!(text.contains("run.name = not set on rank 1, \"a\" on rank 0"), "{text}");
        let (_, text) =
            odd(&["a = 1\nb = 1\nc = 1\nd = 1", "a = 2\nb = 2\nc = 2\nd = 2"]).expect("all differ");
        assert!(text.contains("a = 2") && text.contains("c = 2") && text.contains("; and 1 more"), "{text}");
    }

    #[test]
    fn many_ranks_are_counted() {
        let texts: Vec<&str> = (0..100).map(|rank| if rank == 41 { "a = 2" } else { "a = 1" }).collect();
        let (rank, text) = odd(&texts).expect("rank 41 differs");
        assert!(rank == 41 && text.contains("14, 15, and 83 more: a = 2 on rank 41, 1 on rank 0"), "{text}");
        assert_eq!(first_failure(&[b"null".to_vec(), b"\"late\"".to_vec()]), Some((1, "late".into())));
        assert_eq!(first_failure(&[b"null".to_vec()]), None);
    }

    #[test]
    fn in_one_process_nothing_is_exchanged() {
        let agreement = Agreement { backend: &Backend::Threads, limit: Duration::ZERO };
        assert_eq!(agreement.decide("x", || Ok(3)).expect("decided"), 3);
        assert!(agreement.everyone("x", || anyhow::bail!("no") as anyhow::Result<()>).is_err());
        assert!(agreement.alike("x", "y").is_ok());
    }
}
