//! The parameters of one rank: a tensor a parameter, or (weights sharded) a shard a part. Initial values are drawn by global index, so that every layout starts the same;
//! export and import go through layout-free pieces, so that a checkpoint fits every layout.

use std::sync::Arc;

use plica_comm::Mesh;
use plica_kernels::ledger::naming;
use plica_kernels::rng::{Purpose, Stream};
use plica_kernels::{Category, Device, Element, Float, Tensor};

use crate::error::Error;
use crate::param::piece::{Piece, pieces};
use crate::param::spec::{Init, ParamId, ParamSpec, ParamSpecs};
use crate::place::Place;
use crate::shard::gather::Shards;
use crate::shard::part::Part;
use crate::shard::{Kept, ShardGroups, ShardOptions, Sharding, WeightSpan, Zero};

/// Fewest draws that are worth a thread.
const INIT_GRAIN: usize = 4096;

/// The parameters of one rank.
#[derive(Debug)]
pub struct Params<T: Float> {
    place: Place,
    device: Device,
    specs: Vec<ParamSpec>,
    pieces: Vec<Vec<Piece>>,
    sharding: Arc<Sharding>,
    groups: Option<ShardGroups>,
    weights: Weights<T>,
}

/// Where the weights are.
#[derive(Debug)]
enum Weights<T: Float> {
    /// A tensor a parameter.
    Whole(Vec<Tensor<T>>),
    /// A shard a part, and what is gathered now.
    Shards(Shards<T>),
}

/// What a rank holds of a parameter, or of anything that is cut like it.
#[derive(Debug)]
pub struct Held<E: Element> {
    /// The tensor that keeps it.
    pub tensor: Tensor<E>,
    /// The layout-free tensors, as far as they are held; [`Piece::copy_out`] reads them from the tensor.
    pub pieces: Vec<Piece>,
}

impl<T: Float> Params<T> {
    /// Allocates and initialises this rank's parts of all parameters, nothing sharded.
    ///
    /// # Errors
    /// [`Error::Indivisible`] when a dim does not divide over its axis; nothing is allocated then.
    pub fn new(specs: &ParamSpecs, place: &Place, device: &Device, seed: u64) -> Result<Params<T>, Error> {
        let sharding = Sharding::new(specs.list(), place, &ShardOptions::default())?;
        Params::build(specs, place, device, seed, sharding, None)
    }

    /// Allocates and initialises what this rank keeps of all parameters.
    ///
    /// # Errors
    /// As [`Sharding::new`]; nothing is allocated then. [`Error::Comm`] where a group cannot be made.
    pub fn sharded(
        specs: &ParamSpecs,
        mesh: &Mesh,
        device: &Device,
        seed: u64,
        options: &ShardOptions,
    ) -> Result<Params<T>, Error> {
        let place = Place::new(mesh.layout(), mesh.rank());
        let sharding = Sharding::new(specs.list(), &place, options)?;
        let groups = match options.zero {
            Zero::None => None,
            _ => Some(ShardGroups::new(mesh, options.group)?),
        };
        Params::build(specs, &place, device, seed, sharding, groups)
    }

    fn build(
        specs: &ParamSpecs,
        place: &Place,
        device: &Device,
        seed: u64,
        sharding: Sharding,
        groups: Option<ShardGroups>,
    ) -> Result<Params<T>, Error> {
        let specs = specs.list().to_vec();
        let pieces: Vec<Vec<Piece>> = specs.iter().map(|s| pieces(s, place)).collect::<Result<_, _>>()?;
        let sharded = sharding.is_sharded(Kept::Weight);
        let new = |what: String, shape: &[usize], filled: bool| {
            let make = || match filled {
                true => Tensor::empty(device, shape, Category::Parameter),
                // Padded rows, and the padding of shards, stay zero.
                false => Tensor::zeros(device, shape, Category::Parameter),
            };
            naming(|| format!("weights of {what}"), make)
        };
        let mut tensors: Vec<Tensor<T>> = match sharded {
            true => {
                let parts = sharding.parts().iter();
                parts.map(|part| new(part.name(&specs), &[part.own_len()], false)).collect()
            }
            false => (0..specs.len())
                .map(|id| {
                    let shape = sharding.shape(ParamId(id));
                    let covered = pieces[id].iter().map(Piece::len).sum::<usize>();
                    new(specs[id].name.clone(), shape, covered == shape.iter().product::<usize>())
                })
                .collect(),
        };
        for (index, spec) in specs.iter().enumerate() {
            let id = ParamId(index);
            let tensor = if sharded { sharding.part_of(id).0 } else { index };
            for piece in sharding.pieces(Kept::Weight, id, &pieces[index]) {
                let drawn = draw::<T>(spec.init, &piece, device, seed);
                piece.copy_in(&mut tensors[tensor], &drawn);
            }
        }
        let weights = match sharded {
            true => Weights::Shards(Shards::new(tensors, sharding.units().len())),
            false => Weights::Whole(tensors),
        };
        let sharding = Arc::new(sharding);
        Ok(Params { place: *place, device: device.clone(), specs, pieces, sharding, groups, weights })
    }

    /// What the parameters are.
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// Where this rank stands.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The device of the values.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// All handles, in the order of declaration.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = ParamId> + use<T> {
        (0..self.specs.len()).map(ParamId)
    }

    /// The handle of a name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.specs.iter().position(|s| s.name == name).map(ParamId)
    }

    /// Description of a parameter.
    pub fn spec(&self, id: ParamId) -> &ParamSpec {
        &self.specs[id.0]
    }

    /// Shape of this rank's part.
    pub fn local_shape(&self, id: ParamId) -> &[usize] {
        self.sharding.shape(id)
    }

    /// This rank's part, where weights are not sharded.
    ///
    /// # Panics
    /// When they are: layers go through [`Params::weight`], everything else through [`Params::held`].
    pub fn value(&self, id: ParamId) -> &Tensor<T> {
        match &self.weights {
            Weights::Whole(values) => &values[id.0],
            Weights::Shards(_) => panic!("{} is sharded: no complete tensor is kept", self.specs[id.0].name),
        }
    }

    /// This rank's part, for tests; weights are not sharded.
    ///
    /// # Panics
    /// As [`Params::value`].
    pub fn value_mut(&mut self, id: ParamId) -> &mut Tensor<T> {
        match &mut self.weights {
            Weights::Whole(values) => &mut values[id.0],
            Weights::Shards(_) => panic!("{} is sharded: no complete tensor is kept", self.specs[id.0].name),
        }
    }

    /// The complete tensor of this rank's part: the kept one, or a view of the gathered unit.
    ///
    /// # Panics
    /// When weights are sharded and the unit is not gathered.
    pub fn weight(&self, id: ParamId) -> Tensor<T> {
        match &self.weights {
            Weights::Whole(values) => values[id.0].clone(),
            Weights::Shards(shards) => {
                let unit = self.sharding.unit_of(id);
                let index = self.sharding.unit(unit).ids.iter().position(|i| *i == id).expect("of its unit");
                shards.weight(unit, index).unwrap_or_else(|| {
                    panic!("{} is used, but its unit is not gathered", self.specs[id.0].name)
                })
            }
        }
    }

    /// What this rank keeps of a parameter.
    pub fn held(&self, id: ParamId) -> Held<T> {
        let tensor = match &self.weights {
            Weights::Whole(values) => values[id.0].clone(),
            Weights::Shards(shards) => shards.part(self.sharding.part_of(id).0).clone(),
        };
        Held { tensor, pieces: self.sharding.pieces(Kept::Weight, id, &self.pieces[id.0]) }
    }

    /// The tensor with the run of elements that this rank updates, and where the run starts in it.
    pub(crate) fn target(&mut self, id: ParamId) -> (&mut Tensor<T>, usize) {
        let (own, start) = self.sharding.own(id);
        match &mut self.weights {
            Weights::Whole(values) => (&mut values[id.0], own.start),
            Weights::Shards(shards) => (shards.part_mut(self.sharding.part_of(id).0), start),
        }
    }

    /// Gives up complete weights that nobody holds (weights sharded): before an update, and after an evaluation.
    ///
    /// # Panics
    /// When a guard is alive.
    pub fn reshard(&mut self) {
        if let Weights::Shards(shards) = &mut self.weights {
            shards.reshard();
        }
    }

    /// Keeps when units of sharded weights are gathered and released, until [`Params::take_trace`].
    pub fn start_trace(&self) {
        self.shards().into_iter().for_each(|shards| shards.lives().start());
    }

    /// The lives of complete weights that began and ended since [`Params::start_trace`]; none where weights are not
    /// sharded.
    pub fn take_trace(&self) -> Vec<WeightSpan> {
        self.shards().map_or(Vec::new(), |shards| shards.lives().take())
    }

    /// Who keeps what.
    pub fn sharding(&self) -> &Arc<Sharding> {
        &self.sharding
    }

    /// Communicators of the shards; none where nothing is sharded.
    pub fn groups(&self) -> Option<&ShardGroups> {
        self.groups.as_ref()
    }

    /// The shards, where weights are sharded.
    pub(crate) fn shards(&self) -> Option<&Shards<T>> {
        match &self.weights {
            Weights::Whole(_) => None,
            Weights::Shards(shards) => Some(shards),
        }
    }

    /// The layout-free tensors that this rank's part consists of.
    pub fn pieces(&self, id: ParamId) -> &[Piece] {
        &self.pieces[id.0]
    }

    /// Whether this rank is the one that counts and writes this part.
    pub fn is_first_replica(&self, id: ParamId) -> bool {
        self.specs[id.0].is_first_replica(&self.place)
    }

    /// Elements of this rank's parts, padding of the vocabulary included, whether they are sharded or not.
    pub fn local_len(&self) -> usize {
        self.sharding.parts().iter().map(Part::len).sum()
    }

    /// Elements of the whole model, padding not counted.
    pub fn global_len(&self) -> usize {
        self.specs.iter().map(ParamSpec::len).sum()
    }

    /// Every piece that this rank keeps with its values, in the order of declaration.
    pub fn export(&self) -> impl Iterator<Item = (ParamId, Piece, Vec<T>)> {
        self.ids().flat_map(move |id| {
            let held = self.held(id);
            held.pieces.into_iter().map(move |piece| {
                let values = piece.copy_out(&held.tensor);
                (id, piece, values)
            })
        })
    }

    /// Fills every piece that this rank keeps with the values that `read` gives for it, in the order of
    /// [`Piece::copy_out`].
    ///
    /// # Errors
    /// The first error of `read`.
    pub fn import<E>(&mut self, mut read: impl FnMut(ParamId, &Piece) -> Result<Vec<T>, E>) -> Result<(), E> {
        for id in self.ids() {
            for piece in self.sharding.pieces(Kept::Weight, id, &self.pieces[id.0]) {
                let values = read(id, &piece)?;
                let tensor = match &mut self.weights {
                    Weights::Whole(values) => &mut values[id.0],
                    Weights::Shards(shards) => shards.part_mut(self.sharding.part_of(id).0),
                };
                piece.copy_in(tensor, &values);
            }
        }
        Ok(())
    }
}

/// Initial values of a piece, drawn by the index in the layout-free tensor.
fn draw<T: Float>(init: Init, piece: &Piece, device: &Device, seed: u64) -> Vec<T> {
    let fixed = match init {
        Init::Ones => Some(1.0),
        Init::Zeros => Some(0.0),
        Init::Normal { .. } | Init::Uniform { .. } => None,
    };
    if let Some(value) = fixed {
        return vec![T::from_f64(value); piece.len()];
    }
    let stream = Stream::new(seed, Purpose::Init(&piece.name));
    // Runs by their first place among the piece's elements; they are of one length, except at the ends of a shard.
    let mut runs: Vec<(usize, u64)> = Vec::new();
    let mut filled = 0;
    piece.global_runs(|global, len| {
        runs.push((filled, global as u64));
        filled += len;
    });
    let mut values = vec![T::from_f64(0.0); piece.len()];
    device.pool().for_rows_mut(&mut values, 1, INIT_GRAIN, |first, out| {
        let mut run = runs.partition_point(|(start, _)| *start <= first) - 1;
        for (i, slot) in out.iter_mut().enumerate() {
            let at = first + i;
            run += usize::from(runs.get(run + 1).is_some_and(|(start, _)| *start == at));
            let (start, global) = runs[run];
            let index = global + (at - start) as u64;
            *slot = T::from_f64(match init {
                Init::Normal { std } => std * stream.normal(index),
                Init::Uniform { bound } => bound * (2.0 * stream.uniform(index) - 1.0),
                Init::Ones | Init::Zeros => unreachable!("fixed values are not drawn"),
            });
        }
    });
    values
}
