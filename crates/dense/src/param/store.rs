//! The parameters of one rank. Initial values are drawn by global index, so that every layout starts the same;
//! export and import go through layout-free pieces, so that a checkpoint fits every layout.

use plica_kernels::rng::{Purpose, Stream};
use plica_kernels::{Category, Device, Float, Tensor};

use crate::error::Error;
use crate::param::piece::{Piece, local_shape, pieces};
use crate::param::spec::{Init, ParamId, ParamSpec, ParamSpecs};
use crate::place::Place;

/// Fewest draws that are worth a thread.
const INIT_GRAIN: usize = 4096;

/// The parameters of one rank.
#[derive(Debug)]
pub struct Params<T: Float> {
    place: Place,
    device: Device,
    specs: Vec<ParamSpec>,
    pieces: Vec<Vec<Piece>>,
    values: Vec<Tensor<T>>,
}

impl<T: Float> Params<T> {
    /// Allocates and initialises this rank's parts of all parameters.
    ///
    /// # Errors
    /// [`Error::Indivisible`] when a dim does not divide over its axis; nothing is allocated then.
    pub fn new(specs: &ParamSpecs, place: &Place, device: &Device, seed: u64) -> Result<Params<T>, Error> {
        let specs = specs.list().to_vec();
        let cut: Vec<Vec<Piece>> = specs.iter().map(|s| pieces(s, place)).collect::<Result<_, _>>()?;
        let mut values = Vec::with_capacity(specs.len());
        for (spec, pieces) in specs.iter().zip(&cut) {
            let shape = local_shape(spec, place)?;
            let covered = pieces.iter().map(Piece::len).sum::<usize>() == shape.iter().product::<usize>();
            let mut value = match covered {
                true => Tensor::empty(device, shape.as_slice(), Category::Parameter),
                // Padded rows stay zero.
                false => Tensor::zeros(device, shape.as_slice(), Category::Parameter),
            };
            for piece in pieces {
                let drawn = draw::<T>(spec.init, piece, device, seed);
                piece.copy_in(&mut value, &drawn);
            }
            values.push(value);
        }
        Ok(Params { place: *place, device: device.clone(), specs, pieces: cut, values })
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

    /// This rank's part.
    pub fn value(&self, id: ParamId) -> &Tensor<T> {
        &self.values[id.0]
    }

    /// This rank's part, for the optimizer and for tests.
    pub fn value_mut(&mut self, id: ParamId) -> &mut Tensor<T> {
        &mut self.values[id.0]
    }

    /// The layout-free tensors that this rank's part consists of.
    pub fn pieces(&self, id: ParamId) -> &[Piece] {
        &self.pieces[id.0]
    }

    /// Whether this rank is the one that counts and writes this part.
    pub fn is_first_replica(&self, id: ParamId) -> bool {
        self.specs[id.0].is_first_replica(&self.place)
    }

    /// Elements on this rank, padding included.
    pub fn local_len(&self) -> usize {
        self.values.iter().map(Tensor::len).sum()
    }

    /// Elements of the whole model, padding not counted.
    pub fn global_len(&self) -> usize {
        self.specs.iter().map(ParamSpec::len).sum()
    }

    /// Every piece with its values, in the order of declaration.
    pub fn export(&self) -> impl Iterator<Item = (ParamId, &Piece, Vec<T>)> {
        self.ids().flat_map(move |id| {
            self.pieces(id).iter().map(move |piece| (id, piece, piece.copy_out(self.value(id))))
        })
    }

    /// Fills every piece with the values that `read` gives for it, in the order of [`Piece::copy_out`].
    ///
    /// # Errors
    /// The first error of `read`.
    pub fn import<E>(&mut self, mut read: impl FnMut(ParamId, &Piece) -> Result<Vec<T>, E>) -> Result<(), E> {
        for index in 0..self.specs.len() {
            for piece in &self.pieces[index] {
                let values = read(ParamId(index), piece)?;
                piece.copy_in(&mut self.values[index], &values);
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
    let mut starts = Vec::new();
    let mut row_len = 1;
    piece.global_runs(|global, len| {
        starts.push(global as u64);
        row_len = len;
    });
    let mut values = vec![T::from_f64(0.0); piece.len()];
    device.pool().for_rows_mut(&mut values, 1, INIT_GRAIN, |first, out| {
        for (i, slot) in out.iter_mut().enumerate() {
            let at = first + i;
            let index = starts[at / row_len] + (at % row_len) as u64;
            *slot = T::from_f64(match init {
                Init::Normal { std } => std * stream.normal(index),
                Init::Uniform { bound } => bound * (2.0 * stream.uniform(index) - 1.0),
                Init::Ones | Init::Zeros => unreachable!("fixed values are not drawn"),
            });
        }
    });
    values
}
