//! Modelled links from the command line: no operation of the named group finishes before rounds·α + V/β after its
//! start, V the bytes that the rank sends (`plica_comm::record::Link`). So a slower network is tried on one machine,
//! and what overlap would hide on it is measured. Results do not change, only times.

use std::time::Duration;

use clap::Args;
use plica_comm::record::Link;
use plica_comm::{RecordOptions, Recorder};
use plica_folding::groups::Family;

/// Name that stands for every group.
const ALL: &str = "all";

/// Longest time of a round, in microseconds: an hour.
const MAX_ALPHA_US: f64 = 3.6e9;

/// The links that a command was told to model.
#[derive(Clone, Debug, Default, PartialEq, Args)]
pub struct LinkArguments {
    /// Model a link: operations of the group take at least ALPHA_US microseconds a round and their sent bytes at GB_S
    /// (10^9 bytes a second). GROUP is a group's name (tp, cp, pp, dp_cp, edp, world ...; tokens travel to experts in ep
    /// with all-to-all, in etp_ep with the other dispatchers) or `all`, for those that are not named. May be repeated.
    #[arg(long = "link", value_name = "GROUP=ALPHA_US,GB_S", value_parser = parse_link)]
    pub links: Vec<Link>,
}

impl LinkArguments {
    /// What the recorders of a run are told: links of named groups before that of all.
    pub fn record(&self) -> RecordOptions {
        let mut links = self.links.clone();
        links.sort_by_key(|link| link.group.is_none());
        RecordOptions { links, ..RecordOptions::default() }
    }
}

/// The groups of modelled links that had no operation on a rank, beside those that had: a link that was meant for
/// another group changes nothing. None where every link applied.
pub fn unused(recorder: &Recorder, links: &[Link]) -> Option<String> {
    let mut used: Vec<String> = recorder.traffic().into_iter().map(|(_, group, _)| group).collect();
    used.sort();
    used.dedup();
    let named = links.iter().filter_map(|link| link.group.as_deref());
    let idle: Vec<&str> = named.filter(|name| !used.iter().any(|group| group == name)).collect();
    (!idle.is_empty()).then(|| {
        let (idle, used) = (idle.join(", "), used.join(", "));
        format!(
            "--link {idle}: no operation on rank {} was of that group; there were {used}",
            recorder.rank()
        )
    })
}

/// A link from `GROUP=ALPHA_US,GB_S`.
///
/// # Errors
/// What of the text is wrong, and what would be right.
pub fn parse_link(text: &str) -> Result<Link, String> {
    let form = "write GROUP=ALPHA_US,GB_S, for example ep=50,1.5";
    let (group, numbers) = text.split_once('=').ok_or_else(|| format!("no `=`: {form}"))?;
    let (alpha, rate) = numbers.split_once(',').ok_or_else(|| format!("no `,` after `=`: {form}"))?;
    let number = |name: &str, text: &str| {
        let number: f64 = text.trim().parse().map_err(|_| format!("{name} `{text}` is no number: {form}"))?;
        Ok::<f64, String>(number)
    };
    let (alpha_us, gb_per_s) = (number("ALPHA_US", alpha)?, number("GB_S", rate)?);
    if !(0.0..=MAX_ALPHA_US).contains(&alpha_us) {
        return Err(format!("ALPHA_US {alpha_us}: from 0 to {MAX_ALPHA_US:e} microseconds"));
    }
    if gb_per_s.is_nan() || gb_per_s < 1e-6 {
        return Err(format!("GB_S {gb_per_s}: at least 1e-6, or `inf` for a link without limit"));
    }
    Ok(Link {
        group: group_name(group.trim())?,
        alpha: Duration::from_secs_f64(alpha_us / 1e6),
        bytes_per_second: gb_per_s * 1e9,
    })
}

/// The name of a group as its communicator has it; none for all.
fn group_name(name: &str) -> Result<Option<String>, String> {
    let families = || Family::ALL.iter().map(|family| family.name());
    // Hybrid sharding cuts these two into groups of shards and of copies.
    let parts = [Family::DpCp, Family::Edp].map(|family| ["shards", "copies"].map(|part| (family, part)));
    let mut parts = parts.iter().flatten().map(|(family, part)| format!("{} {part}", family.name()));
    if name == ALL {
        return Ok(None);
    }
    if families().any(|family| family == name) || parts.any(|part| part == name) {
        return Ok(Some(name.to_string()));
    }
    let known: Vec<&str> = families().collect();
    Err(format!("no group `{name}`: one of {}, or `{ALL}`", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_a_group_a_latency_and_a_rate() {
        let link = parse_link("ep=50,1.5").expect("well formed");
        assert_eq!(link.group.as_deref(), Some("ep"));
        assert_eq!((link.alpha, link.bytes_per_second), (Duration::from_micros(50), 1.5e9));
        assert_eq!(parse_link("all = 0 , inf").expect("well formed").group, None);
        let named = parse_link("dp_cp shards=1,1").expect("a group of hybrid sharding");
        assert_eq!(named.group.as_deref(), Some("dp_cp shards"));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, part) in [
            ("ep", "no `=`"),
            ("ep=50", "no `,`"),
            ("ep=x,1", "ALPHA_US `x` is no number"),
            ("ep=1,", "GB_S `` is no number"),
            ("ep=-1,1", "ALPHA_US -1: from 0"),
            ("ep=1,0", "GB_S 0: at least"),
            ("ep=1,NaN", "GB_S NaN: at least"),
            ("epp=1,1", "no group `epp`: one of tp, cp"),
        ] {
            let error = parse_link(text).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn named_groups_come_before_all() {
        let links = ["all=9,1", "ep=1,1", "tp=2,1"].map(|text| parse_link(text).expect("well formed"));
        let record = LinkArguments { links: links.to_vec() }.record();
        let names: Vec<Option<&str>> = record.links.iter().map(|link| link.group.as_deref()).collect();
        assert_eq!(names, [Some("ep"), Some("tp"), None]);
    }
}
