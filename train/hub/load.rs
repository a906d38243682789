//! Filling a rank from a published safetensors file. Names, shapes and types are compared with the model first
//! and every difference is listed; then each rank copies its own index ranges. Training starts fresh: moments
//! are zero, and master weights are taken from the file, not from rounded weights.

use plica_dense::optim::State;
use plica_dense::param::Piece;
use plica_dense::{Optimizer, ParamSpec, Params, Trainable};

use super::{HubError, Names};
use crate::checkpoint::read::{Expected, TensorFile, expected};
use crate::step::Engine;

/// What a published file of these parameters holds: name and shape of every tensor.
///
/// # Errors
/// A parameter that is no part of the published model, or that cannot be cut.
pub fn expected_tensors(specs: &[ParamSpec], names: &Names) -> Result<Expected, HubError> {
    let own = expected(specs, "")?;
    let hub = names.hub_all(own.keys().map(String::as_str))?;
    Ok(hub.into_iter().map(str::to_string).zip(own.values().cloned()).collect())
}

/// Fills the parameters of a rank, which are all of `whole` or some; their optimizer state is not touched (see
/// [`load_engine`]).
///
/// # Errors
/// Tensors that are missing, not of this model, of another shape or no floats: all are listed and nothing is
/// changed.
pub fn load_params<T: Trainable>(
    params: &mut Params<T>,
    whole: &[ParamSpec],
    names: &Names,
    file: &TensorFile,
) -> Result<(), HubError> {
    file.check(&expected_tensors(whole, names)?)?;
    params.import(|_, piece| Ok(file.piece::<T>(&renamed(piece, names)?, "")?))
}

/// Fills the parameters of an engine and starts its optimizer anew.
///
/// # Errors
/// As [`load_params`].
pub fn load_engine<T: Trainable>(
    engine: &mut Engine<T>,
    names: &Names,
    file: &TensorFile,
) -> Result<(), HubError> {
    let whole: Vec<ParamSpec> = engine.whole().map(|(_, _, spec)| spec.clone()).collect();
    load_params(&mut engine.params, &whole, names, file)?;
    engine.optimizer = Optimizer::new(*engine.optimizer.config(), &engine.params);
    let zero = <T::Acc as Default>::default();
    engine.optimizer.import(&engine.params, |_, state, piece| match state {
        State::Master => Ok(file.piece::<T::Acc>(&renamed(piece, names)?, "")?),
        State::M | State::V => Ok(vec![zero; piece.len()]),
    })
}

/// The same piece under its published name.
fn renamed(piece: &Piece, names: &Names) -> Result<Piece, HubError> {
    let mut piece = piece.clone();
    piece.name = names.hub_all([piece.name.as_str()])?[0].to_string();
    Ok(piece)
}
