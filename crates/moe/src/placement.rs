//! Experts on devices with replicas of the loaded ones, in the way of EPLB (deepseek-ai/EPLB): replicate the
//! expert of largest load a replica until the slots are full; pack the replicas, heaviest first, each into
//! the least loaded device that has a slot. Hierarchical where the groups of experts divide over the nodes:
//! groups go to nodes first, replication and packing stay inside a node. A replica carries an equal share.
//!
//! Ties are stable everywhere (lower expert, earlier replica, lower device), so that the answer is the same
//! on every machine; a device never holds two replicas of one expert where another assignment avoids it.
//! Leaves out an optimal search: the packing is greedy.

use crate::error::MoeError;

/// What is to be placed, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementSpec {
    /// Slots in all: experts plus redundant replicas.
    pub replicas: usize,
    /// Contiguous groups of experts that should stay on one node.
    pub groups: usize,
    /// Nodes.
    pub nodes: usize,
    /// Devices over all nodes.
    pub devices: usize,
}

/// Which expert stands in each slot; slots are listed device by device.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// Expert of each slot, `[replicas]`.
    pub expert_of_slot: Vec<usize>,
    /// Number of replicas of each expert, `[e]`.
    pub replicas_e: Vec<usize>,
    /// Load of each device, when replicas share an expert's load evenly.
    pub device_loads: Vec<f64>,
}

impl Placement {
    /// Largest device load over the mean; 1 when even or empty.
    pub fn max_over_mean(&self) -> f64 {
        let mean = self.device_loads.iter().sum::<f64>() / self.device_loads.len() as f64;
        let max = self.device_loads.iter().copied().fold(0.0, f64::max);
        if mean > 0.0 { max / mean } else { 1.0 }
    }
}

/// Places experts of the given loads.
///
/// # Errors
/// [`MoeError::Placement`] when the slots do not divide over the devices, are fewer than the experts, or the
/// devices do not divide over the nodes; the text has the nearest number that works.
pub fn place(loads_e: &[f64], spec: &PlacementSpec) -> Result<Placement, MoeError> {
    check(loads_e, spec)?;
    let hierarchical = spec.groups.is_multiple_of(spec.nodes) && loads_e.len().is_multiple_of(spec.groups);
    let (groups, nodes) = if hierarchical { (spec.groups, spec.nodes) } else { (1, 1) };
    let group_size = loads_e.len() / groups;
    let group_loads: Vec<f64> = loads_e.chunks(group_size).map(|g| g.iter().sum()).collect();
    let groups_of_node = pack(&group_loads, &(0..groups).collect::<Vec<_>>(), nodes);
    let mut placement = Placement {
        expert_of_slot: Vec::with_capacity(spec.replicas),
        replicas_e: vec![0; loads_e.len()],
        device_loads: Vec::with_capacity(spec.devices),
    };
    for groups in groups_of_node {
        let experts: Vec<usize> = groups.iter().flat_map(|g| g * group_size..(g + 1) * group_size).collect();
        place_in_node(loads_e, &experts, spec.replicas / nodes, spec.devices / nodes, &mut placement);
    }
    Ok(placement)
}

fn check(loads_e: &[f64], spec: &PlacementSpec) -> Result<(), MoeError> {
    let (experts, PlacementSpec { replicas, groups, nodes, devices }) = (loads_e.len(), *spec);
    let refuse = |text: String| Err(MoeError::Placement(text));
    if experts == 0 || groups == 0 || nodes == 0 || devices == 0 {
        return refuse(format!(
            "placement of {experts} experts in {groups} groups on {devices} devices of {nodes} nodes: none of \
             these may be 0"
        ));
    }
    if replicas < experts || !replicas.is_multiple_of(devices) {
        let slots = replicas.max(experts).div_ceil(devices);
        return refuse(format!(
            "{replicas} replicas of {experts} experts on {devices} devices: every device holds the same number \
             of replicas and every expert stands somewhere; use {} = {devices}*{slots}",
            devices * slots
        ));
    }
    if !devices.is_multiple_of(nodes) {
        return refuse(format!(
            "{devices} devices on {nodes} nodes: every node has the same number of devices; use {} devices",
            devices.next_multiple_of(nodes)
        ));
    }
    if let Some(e) = loads_e.iter().position(|l| !l.is_finite() || *l < 0.0) {
        return refuse(format!("load {} of expert {e}: a load is a number of at least 0", loads_e[e]));
    }
    Ok(())
}

fn place_in_node(loads_e: &[f64], experts: &[usize], slots: usize, devices: usize, out: &mut Placement) {
    let expert_of_replica = replicate(loads_e, experts, slots, devices, &mut out.replicas_e);
    let shares: Vec<f64> = expert_of_replica.iter().map(|&e| loads_e[e] / out.replicas_e[e] as f64).collect();
    let mut packs = pack(&shares, &expert_of_replica, devices);
    separate(&mut packs, &expert_of_replica, &shares);
    for pack in packs {
        out.device_loads.push(pack.iter().map(|&r| shares[r]).sum());
        out.expert_of_slot.extend(pack.iter().map(|&r| expert_of_replica[r]));
    }
}

/// One replica of each expert, then again and again one of the expert whose replicas carry most, among those
/// that have fewer replicas than there are devices.
fn replicate(
    loads_e: &[f64],
    experts: &[usize],
    slots: usize,
    devices: usize,
    replicas_e: &mut [usize],
) -> Vec<usize> {
    let mut expert_of_replica = experts.to_vec();
    experts.iter().for_each(|&e| replicas_e[e] = 1);
    while expert_of_replica.len() < slots {
        let share = |e: usize| (replicas_e[e] < devices, loads_e[e] / replicas_e[e] as f64);
        let first = experts[0];
        let heaviest = experts.iter().fold(first, |best, &e| if share(e) > share(best) { e } else { best });
        expert_of_replica.push(heaviest);
        replicas_e[heaviest] += 1;
    }
    expert_of_replica
}

/// Items, heaviest first, into packs of equal item count: the least loaded pack with room that does not hold
/// the item's kind yet, or else the least loaded with room. Returns the items of each pack.
fn pack(weights: &[f64], kinds: &[usize], packs: usize) -> Vec<Vec<usize>> {
    let room = weights.len() / packs;
    let mut order: Vec<usize> = (0..weights.len()).collect();
    if room > 1 {
        order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    }
    let mut held: Vec<Vec<usize>> = vec![Vec::with_capacity(room); packs];
    let mut loads = vec![0.0; packs];
    for item in order {
        let holds = |p: usize| held[p].iter().any(|&other| kinds[other] == kinds[item]);
        let key = |p: usize| (holds(p), loads[p]);
        let best = (0..packs)
            .filter(|&p| held[p].len() < room)
            .reduce(|best, p| if key(p) < key(best) { p } else { best })
            .expect("the packs have room for all items");
        loads[best] += weights[item];
        held[best].push(item);
    }
    held
}

/// Swaps items between packs until no pack holds two of a kind, where a swap can do that; each time the swap
/// that leaves the smaller larger load, the first of equals.
fn separate(packs: &mut [Vec<usize>], kinds: &[usize], weights: &[f64]) {
    let load = |pack: &[usize]| pack.iter().map(|&i| weights[i]).sum::<f64>();
    let holds_besides = |pack: &[usize], slot: usize, kind: usize| {
        pack.iter().enumerate().any(|(s, &i)| s != slot && kinds[i] == kind)
    };
    for p in 0..packs.len() {
        for slot in 0..packs[p].len() {
            let item = packs[p][slot];
            if !holds_besides(&packs[p], slot, kinds[item]) {
                continue;
            }
            let mut best: Option<(f64, usize, usize)> = None;
            for q in (0..packs.len()).filter(|&q| q != p) {
                for (other_slot, &other) in packs[q].iter().enumerate() {
                    let clash = holds_besides(&packs[q], other_slot, kinds[item])
                        || holds_besides(&packs[p], slot, kinds[other])
                        || kinds[other] == kinds[item];
                    let moved = weights[item] - weights[other];
                    let after = (load(&packs[p]) - moved).max(load(&packs[q]) + moved);
                    if !clash && best.is_none_or(|(least, _, _)| after < least) {
                        best = Some((after, q, other_slot));
                    }
                }
            }
            if let Some((_, q, other_slot)) = best {
                let other = packs[q][other_slot];
                packs[q][other_slot] = item;
                packs[p][slot] = other;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plica_kernels::rng::{Purpose, Stream};

    const LAYER_1: [f64; 12] = [90., 132., 40., 61., 104., 165., 39., 4., 73., 56., 183., 86.];
    const LAYER_2: [f64; 12] = [20., 107., 104., 64., 19., 197., 187., 157., 172., 86., 16., 27.];
    const SPEC: PlacementSpec = PlacementSpec { replicas: 16, groups: 4, nodes: 2, devices: 8 };

    #[test]
    fn s31_published_loads_with_a_stable_tie() {
        let layer_2 = place(&LAYER_2, &SPEC).unwrap();
        assert_eq!(layer_2.device_loads, [173., 179.5, 120.5, 172., 123., 152., 118.5, 117.5]);
        assert!((layer_2.max_over_mean() - 1.2422).abs() < 5e-5);
        assert_eq!(layer_2.expert_of_slot, [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]);
        let layer_1 = place(&LAYER_1, &SPEC).unwrap();
        assert_eq!(layer_1.expert_of_slot, [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]);
        assert!((layer_1.max_over_mean() - 1.208).abs() < 5e-4);
    }

    #[test]
    fn s31_what_does_not_divide_is_refused_with_a_proposal() {
        let spec = PlacementSpec { replicas: 256, groups: 1, nodes: 1, devices: 3 };
        let text = place(&[1.0; 256], &spec).unwrap_err().to_string();
        assert!(text.contains("258 = 3*86") && text.contains("256"), "{text}");
        assert!(place(&[1.0; 8], &PlacementSpec { replicas: 4, groups: 1, nodes: 1, devices: 4 }).is_err());
        assert!(place(&[1.0; 8], &PlacementSpec { replicas: 9, groups: 1, nodes: 2, devices: 3 }).is_err());
        assert!(place(&[f64::NAN], &PlacementSpec { replicas: 1, groups: 1, nodes: 1, devices: 1 }).is_err());
    }

    #[test]
    fn random_loads_fill_every_slot_and_never_double_an_expert_on_a_device() {
        let stream = Stream::new(17, Purpose::Named("placement"));
        for case in 0..200u64 {
            let draw = |i: u64, bound: u64| stream.below(case * 100 + i, bound) as usize;
            let devices = 2 + draw(0, 4);
            let experts = devices * (1 + draw(1, 3));
            let spec =
                PlacementSpec { replicas: experts + devices * draw(2, 2), groups: 1, nodes: 1, devices };
            // Few distinct values: many ties.
            let loads: Vec<f64> = (0..experts).map(|e| (1 + draw(10 + e as u64, 3)) as f64).collect();
            let placed = place(&loads, &spec).unwrap();
            assert_eq!(placed, place(&loads, &spec).unwrap());
            assert_eq!(placed.expert_of_slot.len(), spec.replicas);
            assert!((placed.device_loads.iter().sum::<f64>() - loads.iter().sum::<f64>()).abs() < 1e-9);
            for e in 0..experts {
                let slots = placed.expert_of_slot.iter().filter(|&&x| x == e).count();
                assert!(slots == placed.replicas_e[e] && slots > 0, "seed 17 case {case}");
            }
            for device in placed.expert_of_slot.chunks(spec.replicas / devices) {
                let distinct: std::collections::HashSet<_> = device.iter().collect();
                assert_eq!(distinct.len(), device.len(), "seed 17 case {case}: {placed:?}");
            }
        }
    }
}
