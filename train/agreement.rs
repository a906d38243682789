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
        let all = processes.exchange(what, &bytes, self.limit)?;
        match own {
            Some(own) => own,
            None => match serde_json::from_slice::<Told<T>>(&all[0])? {
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
        let told: Told<()> = own.as_ref().map(drop).map_err(|error| format!("{error:#}"));
        let all = processes.exchange(what, &serde_json::to_vec(&told)?, self.limit)?;
        let all: Vec<Told<()>> =
            all.iter().map(|bytes| serde_json::from_slice(bytes)).collect::<Result<_, _>>()?;
        let own_text = told.err();
        let mut failures = all.into_iter().enumerate().filter_map(|(rank, told)| Some((rank, told.err()?)));
        match failures.next() {
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
        let all = processes.exchange(what, own.as_bytes(), self.limit)?;
        let all: Vec<String> =
            all.into_iter().map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).collect();
        match first_odd_one(what, &all) {
            None => Ok(()),
            Some((rank, text)) if rank == processes.rank() => Err(anyhow::anyhow!("{text}")),
            Some((rank, text)) => Err(Elsewhere { rank, text }.into()),
        }
    }
}

/// Most settings that a message about different configurations lists.
const LISTED: usize = 3;

/// The first rank whose text is not that of most ranks (of rank 0, where no text has more), and what differs.
fn first_odd_one(what: &str, all: &[String]) -> Option<(usize, String)> {
    let count = |text: &String| all.iter().filter(|other| *other == text).count();
    let most = all.iter().map(count).max()?;
    let common = all.iter().position(|text| count(text) == most)?;
    let odd = all.iter().position(|text| *text != all[common])?;
    let ranks: Vec<String> =
        (0..all.len()).filter(|rank| all[*rank] == all[common]).map(|rank| rank.to_string()).collect();
    let (mine, theirs) = (settings(&all[odd]), settings(&all[common]));
    let keys: std::collections::BTreeSet<&String> = mine.keys().chain(theirs.keys()).collect();
    let shown = |value: Option<&String>| value.map_or("not set", String::as_str).to_string();
    let different: Vec<String> = keys
        .into_iter()
        .filter(|key| mine.get(*key) != theirs.get(*key))
        .map(|key| {
            let (mine, theirs) = (shown(mine.get(key)), shown(theirs.get(key)));
            format!("{key} = {mine} on rank {odd}, {theirs} on rank {common}")
        })
        .collect();
    let mut text = format!(
        "the {what} of rank {odd} is not that of rank(s) {}: {}",
        ranks.join(", "),
        different[..different.len().min(LISTED)].join("; ")
    );
    if different.len() > LISTED {
        text.push_str(&format!("; and {} more", different.len() - LISTED));
    }
    Some((odd, format!("{text}; every rank needs the same")))
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
        let all: Vec<String> = all.iter().map(|text| text.to_string()).collect();
        first_odd_one("configuration", &all)
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
    fn in_one_process_nothing_is_exchanged() {
        let agreement = Agreement { backend: &Backend::Threads, limit: Duration::ZERO };
        assert_eq!(agreement.decide("x", || Ok(3)).expect("decided"), 3);
        assert!(agreement.everyone("x", || anyhow::bail!("no") as anyhow::Result<()>).is_err());
        assert!(agreement.alike("x", "y").is_ok());
    }
}
