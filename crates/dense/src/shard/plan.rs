//! From declared parameters to units, parts and what this rank keeps of each parameter: pure integers, so that a
//! checkpoint or a planner can ask for ranks that do not exist. Names decide the units: `layers.N.` is a block,
//! `embedding` comes before the blocks, everything else after them.

use std::ops::Range;

use plica_folding::axis::Axis;
use plica_folding::groups;

use crate::error::Error;
use crate::param::piece::{Piece, local_shape};
use crate::param::{Family, ParamId, ParamSpec};
use crate::place::Place;
use crate::shard::options::{ShardOptions, Zero};
use crate::shard::part::{Member, Part};

/// Handle of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitId(pub(crate) usize);

/// Parameters that are gathered together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Name in reports: `embedding`, `layers 2-3`, `experts 2`, `head`.
    pub name: String,
    /// Its parameters.
    pub ids: Vec<ParamId>,
    /// Its parts, indices into [`Sharding::parts`].
    pub parts: Range<usize>,
}

/// Where a unit stands in a forward; units are sorted by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Embedding,
    /// First layer of the group; then the layer whose experts these are.
    Layers(usize, Option<usize>),
    Head,
}

/// A kind of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kept {
    /// Weights.
    Weight,
    /// Gradients after their sum over ranks.
    Gradient,
    /// Moments and master weights.
    State,
}

/// Where a parameter stands in its part.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seat {
    unit: UnitId,
    part: usize,
    /// Position in the part.
    index: usize,
    /// This rank's run of the local tensor, and where it starts in the shard.
    own: Range<usize>,
    start: usize,
    shape: Vec<usize>,
    /// Whether this rank is the one that counts and writes its run, and the whole local tensor.
    counts: [bool; 2],
}

/// The plan of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    options: ShardOptions,
    units: Vec<Unit>,
    parts: Vec<Part>,
    seats: Vec<Seat>,
    backward: Vec<UnitId>,
}

impl Sharding {
    /// The plan of the rank at `place`.
    ///
    /// # Errors
    /// [`Error::Indivisible`]; [`Error::Setting`] when the ranks of a hybrid group do not divide a family.
    pub fn new(specs: &[ParamSpec], place: &Place, options: &ShardOptions) -> Result<Sharding, Error> {
        let mut keys: Vec<(Key, Vec<ParamId>)> = Vec::new();
        for (index, spec) in specs.iter().enumerate() {
            let key = key_of(spec, options);
            match keys.iter_mut().find(|(k, _)| *k == key) {
                Some((_, ids)) => ids.push(ParamId(index)),
                None => keys.push((key, vec![ParamId(index)])),
            }
        }
        keys.sort_by_key(|(key, _)| *key);
        let shapes: Vec<Vec<usize>> =
            specs.iter().map(|spec| local_shape(spec, place)).collect::<Result<_, _>>()?;
        let (mut units, mut parts) = (Vec::new(), Vec::new());
        for (key, ids) in &keys {
            let first = parts.len();
            for replicas in [groups::Family::TpDpCp, groups::Family::DpCp, groups::Family::Edp] {
                parts.extend(parts_of(replicas, ids, specs, &shapes, place, options)?);
            }
            units.push(Unit { name: name_of(*key, options), ids: ids.clone(), parts: first..parts.len() });
        }
        let backward = backward_order(&keys);
        let mut plan = Sharding { options: *options, units, parts, seats: Vec::new(), backward };
        plan.seats = plan.seats_of(specs, shapes, place);
        Ok(plan)
    }

    /// Where every parameter stands.
    fn seats_of(&self, specs: &[ParamSpec], shapes: Vec<Vec<usize>>, place: &Place) -> Vec<Seat> {
        let mut seats: Vec<Option<Seat>> = specs.iter().map(|_| None).collect();
        for (unit, Unit { parts, .. }) in self.units.iter().enumerate() {
            for part in parts.clone() {
                for (index, id) in self.parts[part].ids.iter().enumerate() {
                    let spec = &specs[id.0];
                    let whole = spec.is_first_replica(place);
                    let shard = match self.options.zero {
                        Zero::None => whole,
                        _ => counts_shard(spec, place, &self.options),
                    };
                    let shape = shapes[id.0].clone();
                    let (unit, counts) = (UnitId(unit), [shard, whole]);
                    seats[id.0] = Some(Seat { unit, part, index, own: 0..0, start: 0, shape, counts });
                }
                for run in self.parts[part].own_runs() {
                    let id = self.parts[part].ids[run.index];
                    let seat = seats[id.0].as_mut().expect("seated above");
                    (seat.own, seat.start) = (run.range.clone(), run.start);
                }
            }
        }
        seats.into_iter().map(|seat| seat.expect("every parameter has a part")).collect()
    }

    /// What was chosen.
    pub fn options(&self) -> &ShardOptions {
        &self.options
    }

    /// All units, in the order of a forward.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Every unit, in the order of a forward.
    pub fn unit_ids(&self) -> impl DoubleEndedIterator<Item = UnitId> + use<> {
        (0..self.units.len()).map(UnitId)
    }

    /// A unit.
    pub fn unit(&self, unit: UnitId) -> &Unit {
        &self.units[unit.0]
    }

    /// The unit of a parameter.
    pub fn unit_of(&self, id: ParamId) -> UnitId {
        self.seats[id.0].unit
    }

    /// All parts.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Index of a parameter's part, and its position there.
    pub fn part_of(&self, id: ParamId) -> (usize, usize) {
        (self.seats[id.0].part, self.seats[id.0].index)
    }

    /// The elements of a parameter's local tensor whose state is this rank's to update, and where they start in
    /// the shard of its part.
    pub fn own(&self, id: ParamId) -> (Range<usize>, usize) {
        (self.seats[id.0].own.clone(), self.seats[id.0].start)
    }

    /// Shape of a parameter's whole local tensor.
    pub fn shape(&self, id: ParamId) -> &[usize] {
        &self.seats[id.0].shape
    }

    /// The units that follow `unit` in a forward, or in a backward.
    pub fn following(&self, unit: UnitId, backward: bool) -> Vec<UnitId> {
        let order: Vec<UnitId> = if backward { self.backward.clone() } else { self.unit_ids().collect() };
        order.into_iter().skip_while(|u| *u != unit).skip(1).collect()
    }

    /// Whether a kind of state is kept as this rank's run alone.
    pub fn is_sharded(&self, kept: Kept) -> bool {
        let from = match kept {
            Kept::State => Zero::Optimizer,
            Kept::Gradient => Zero::Optimizer,
            Kept::Weight => Zero::Weights,
        };
        self.options.zero >= from
    }

    /// The elements of a parameter's local tensor that this rank holds of a kind of state, and where they start in
    /// the tensor that keeps them (for gradients of stage 1: the whole one); none: all of them, in place.
    pub fn window(&self, kept: Kept, id: ParamId) -> Option<(Range<usize>, usize)> {
        let (own, start) = self.own(id);
        match kept {
            Kept::State => Some((own, start)),
            Kept::Weight => self.is_sharded(kept).then_some((own, start)),
            Kept::Gradient => match self.options.zero {
                Zero::None => None,
                Zero::Optimizer => Some((own.clone(), own.start)),
                Zero::Gradients | Zero::Weights => Some((own, start)),
            },
        }
    }

    /// What of the pieces of a parameter this rank holds of a kind of state.
    pub fn pieces(&self, kept: Kept, id: ParamId, pieces: &[Piece]) -> Vec<Piece> {
        let Some((range, at)) = self.window(kept, id) else { return pieces.to_vec() };
        pieces.iter().map(|piece| piece.within(self.shape(id), range.clone(), at)).collect()
    }

    /// Whether this rank is the one that counts what it holds of a kind of state in a norm and writes it to a
    /// checkpoint: the first of the ranks that hold the same.
    pub fn counts(&self, kept: Kept, id: ParamId) -> bool {
        self.seats[id.0].counts[usize::from(!self.is_sharded(kept))]
    }
}

/// Number in `layers.N.rest`.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("layers.")?.split_once('.')?.0.parse().ok()
}

fn key_of(spec: &ParamSpec, options: &ShardOptions) -> Key {
    let Some(layer) = layer_of(&spec.name) else {
        return if spec.name == "embedding" { Key::Embedding } else { Key::Head };
    };
    let apart = options.experts_apart && spec.family == Family::Expert;
    Key::Layers(layer / options.unit_layers.max(1) * options.unit_layers.max(1), apart.then_some(layer))
}

fn name_of(key: Key, options: &ShardOptions) -> String {
    match key {
        Key::Embedding => "embedding".into(),
        Key::Head => "head".into(),
        Key::Layers(_, Some(layer)) => format!("experts {layer}"),
        Key::Layers(first, None) if options.unit_layers <= 1 => format!("layer {first}"),
        Key::Layers(first, None) => format!("layers {first}-{}", first + options.unit_layers - 1),
    }
}

/// Head, then blocks from the last to the first, each before its experts, which are needed from the last layer
/// to the first. The backward of the embedding needs no weight.
fn backward_order(keys: &[(Key, Vec<ParamId>)]) -> Vec<UnitId> {
    let mut order: Vec<usize> = (0..keys.len()).filter(|i| keys[*i].0 != Key::Embedding).collect();
    order.sort_by_key(|i| match keys[*i].0 {
        Key::Embedding | Key::Head => (0, 0, 0),
        Key::Layers(first, layer) => (1, usize::MAX - first, layer.map_or(0, |l| usize::MAX - l)),
    });
    order.into_iter().map(UnitId).collect()
}

/// The parts of a unit whose gradients are summed over `replicas` when nothing is sharded. Sharded, dense
/// parameters make one part, those that TP replicates first.
fn parts_of(
    replicas: groups::Family,
    ids: &[ParamId],
    specs: &[ParamSpec],
    shapes: &[Vec<usize>],
    place: &Place,
    options: &ShardOptions,
) -> Result<Vec<Part>, Error> {
    let sharded = options.zero > Zero::None;
    // Without TP both kinds of dense parameters have the same replicas, and travel together.
    let one_kind = sharded || place.size(Axis::Tp) == 1;
    let of = |id: &ParamId| match (one_kind, specs[id.0].family) {
        (true, Family::Dense) => groups::Family::DpCp,
        _ => specs[id.0].reduce_family(),
    };
    let mut members: Vec<Member> = ids
        .iter()
        .filter(|id| of(id) == replicas)
        .map(|id| {
            let (spec, shape) = (&specs[id.0], &shapes[id.0]);
            Member {
                id: *id,
                len: shape.iter().product(),
                row_len: if shape.len() > 1 { shape[shape.len() - 1] } else { 1 },
                same_over_tp: spec.reduce_family() == groups::Family::TpDpCp,
            }
        })
        .collect();
    let Some(first) = members.first() else { return Ok(Vec::new()) };
    let family = specs[first.id.0].family;
    members.sort_by_key(|member| !member.same_over_tp);
    let cut = if sharded { shared_by(family, place, options)? } else { (1, 0) };
    let mut parts = Vec::new();
    let mut open: Vec<Member> = Vec::new();
    for member in members {
        let filled: usize = open.iter().map(|m| m.len).sum();
        if !open.is_empty() && filled + member.len > options.bucket_elements {
            parts.push(Part::new(family, replicas, &std::mem::take(&mut open), cut, options.layout));
        }
        open.push(member);
    }
    parts.push(Part::new(family, replicas, &open, cut, options.layout));
    Ok(parts)
}

/// Ranks that share one copy of a family's state, and this rank's position among them.
fn shared_by(family: Family, place: &Place, options: &ShardOptions) -> Result<(usize, usize), Error> {
    let (replicas, position) = place.replicas(family);
    let Some(group) = options.group else { return Ok((replicas, position)) };
    if group == 0 || !replicas.is_multiple_of(group) {
        let (of, name) = match family {
            Family::Dense => ("dense parameters", "DP x CP"),
            Family::Expert => ("experts", "EDP"),
        };
        return Err(Error::Setting(format!(
            "shard.group = {group} ranks do not divide the {replicas} replicas of {of} ({name} = {replicas}); \
             choose a divisor of {replicas}, or no hybrid sharding"
        )));
    }
    Ok((group, position % group))
}

/// Whether this rank is the first of those that hold the same shard.
fn counts_shard(spec: &ParamSpec, place: &Place, options: &ShardOptions) -> bool {
    let (replicas, position) = place.replicas(spec.family);
    let first_copy = position / options.group.unwrap_or(replicas).max(1) == 0;
    let first = |axis| spec.is_cut_over(axis) || place.coordinate(axis) == 0;
    first_copy
        && !spec.copy
        && match spec.family {
            Family::Dense => first(Axis::Tp),
            Family::Expert => first(Axis::Etp) && first(Axis::Ep),
        }
}
