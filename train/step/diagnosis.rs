//! Where a step that is not finite went wrong. Nothing was updated, so the forward can be run again with the same
//! bits: every micro-batch, part by part, through all stages of a pipeline; each rank remembers the first part
//! whose rows [t, d] are not finite. Weights are looked at as well, and where the forward is finite, the reduced
//! gradients in the order of a backward. One exchange then gives all ranks the same answer. Runs only after a
//! failure: it costs a forward, and no memory that a training step does not need. Leaves out what inside a part
//! began it, and which expert's rank: rows come back to the rank of their token.

use plica_comm::{Group, Purpose};
use plica_dense::shard::{Pass, UnitWalk};
use plica_dense::{Cx, Error, FeedForward, ParamId, TokenBatch, TokenInfo, Trainable};
use plica_kernels::ops::elementwise::is_finite;
use plica_kernels::{Category, Device, Float, Tensor};

use super::Engine;
use crate::model::Chunk;

/// Bytes of a finding's text that travel; the names of parts and parameters are shorter.
const TEXT_BYTES: usize = 160;
/// Parts of a block that are told apart: attention, router, feed-forward.
const PARTS: usize = 3;

/// The first place of a kind, and the rank that saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// World rank.
    pub rank: usize,
    /// Which part and micro-batch, or which parameter.
    pub what: String,
}

/// What was found; the same on all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diagnosis {
    /// First part in the order of a forward whose output is not finite.
    pub forward: Option<Finding>,
    /// First parameter in the order of a forward with a value that is not finite.
    pub weight: Option<Finding>,
    /// First gradient in the order of a backward that is not finite.
    pub gradient: Option<Finding>,
}

impl std::fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.forward, &self.gradient) {
            (Some(Finding { rank, what }), _) => write!(f, "first not finite is {what} of rank {rank}")?,
            (None, Some(Finding { what, .. })) => {
                write!(f, "the forward is finite, first not finite is the gradient of {what}")?;
            }
            (None, None) => write!(f, "every part and every gradient is finite, sums over them are not")?,
        }
        match &self.weight {
            Some(Finding { rank, what }) => write!(f, "; the weight {what} of rank {rank} is not finite"),
            None => write!(f, "; all weights are finite"),
        }
    }
}

/// A candidate: smallest key first.
type Candidate = Option<(u64, String)>;

/// Keeps the earlier of two.
fn earliest(found: &mut Candidate, key: u64, what: impl FnOnce() -> String) {
    if found.as_ref().is_none_or(|(first, _)| key < *first) {
        *found = Some((key, what()));
    }
}

/// Of each kind the candidate with the smallest key over all ranks, of equal ones that of the lowest rank.
fn first_of_all<const N: usize>(
    world: &Group,
    device: &Device,
    own: &[Candidate; N],
) -> Result<[Option<Finding>; N], Error> {
    let row = 1 + TEXT_BYTES;
    let mut numbers = vec![0usize; N * row];
    for (numbers, candidate) in numbers.chunks_mut(row).zip(own) {
        numbers[0] = i64::MAX as usize;
        if let Some((key, what)) = candidate {
            numbers[0] = *key as usize;
            numbers[1..].iter_mut().zip(what.bytes()).for_each(|(number, byte)| *number = usize::from(byte));
        }
    }
    let all = world.exchange_counts(Purpose::Control, device, &numbers)?;
    Ok(std::array::from_fn(|kind| {
        let of = |rank: usize| &all[rank][kind * row..(kind + 1) * row];
        let rank = (0..all.len()).min_by_key(|rank| of(*rank)[0])?;
        let bytes: Vec<u8> = of(rank)[1..].iter().map(|n| *n as u8).take_while(|byte| *byte > 0).collect();
        let found = of(rank)[0] < i64::MAX as usize;
        found.then(|| Finding { rank, what: String::from_utf8_lossy(&bytes).into_owned() })
    }))
}

/// Place of a parameter in a forward: the layer that its name says, from 1; the embedding before, norm and head
/// behind.
fn layer_of(name: &str) -> u64 {
    let number = name.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse::<u64>().ok());
    match number {
        Some(layer) => layer + 1,
        None if name.starts_with("embed") => 0,
        None => u64::from(u32::MAX),
    }
}

/// The first part of one micro-batch whose rows are not finite, by its place in the whole model.
struct Watch<'a> {
    found: &'a mut Candidate,
    layers: usize,
    micro_batch: usize,
    micro_batches: usize,
}

impl Watch<'_> {
    fn see(&mut self, part: usize, finite: bool, name: impl FnOnce() -> String) {
        if finite {
            return;
        }
        let (micro, key) = (self.micro_batch, part * self.micro_batches + self.micro_batch);
        earliest(self.found, key as u64, || format!("{}, micro-batch {micro}", name()));
    }

    fn block(&mut self, layer: usize, part: usize, finite: bool, name: &str) {
        self.see(1 + layer * PARTS + part, finite, || format!("layer {layer}, {name}"));
    }

    fn end(&mut self, part: usize, finite: bool, name: &str) {
        self.see(1 + self.layers * PARTS + part, finite, || name.into());
    }
}

impl<T: Trainable> Chunk<T> {
    /// A forward without a backward that shows every part's rows; see [`Chunk::evaluate`].
    fn watched<'a>(
        &self,
        x_td: Option<Tensor<T>>,
        cx: &mut Cx<'a, T>,
        watch: &mut Watch<'_>,
    ) -> Result<Option<Tensor<T>>, Error> {
        let mut x_td = match (&self.embedding, x_td) {
            (Some(embedding), _) => {
                let _table = cx.gather_of(embedding.table(), Pass::Once)?;
                embedding.forward(cx)?
            }
            (None, x_td) => x_td.expect("rows of the stage before"),
        };
        watch.see(0, self.embedding.is_none() || is_finite(&x_td), || "the embedding".into());
        let mut units = UnitWalk::new(Pass::Once);
        for (layer, block) in self.layers.clone().zip(&self.blocks) {
            units.enter(block.attention_norm.weight(), cx)?;
            let (h_td, _) = block.attention_norm.forward(&x_td, cx);
            let (a_td, _) = block.attention.forward(&h_td, cx)?;
            let (x2_td, h_td, _) = block.feed_forward_norm.forward_sum(&a_td, &x_td, cx);
            watch.block(layer, 0, is_finite(&x2_td), "attention");
            let (f_td, _, report) = block.feed_forward.forward(&h_td, cx)?;
            // A router that carried logits on which it could not rank says so in this sum.
            watch.block(layer, 1, report.as_ref().is_none_or(|report| !report.z_sum.is_nan()), "router");
            x_td = plica_kernels::ops::elementwise::add(&f_td, &x2_td);
            let name = if report.is_some() { "experts" } else { "feed-forward" };
            watch.block(layer, 2, is_finite(&x_td), name);
        }
        units.leave(cx)?;
        let Some(output) = &self.output else { return Ok(Some(x_td)) };
        let _table = cx.gather_of(output.head.table(), Pass::Once)?;
        let _norm = cx.gather_of(output.final_norm.weight(), Pass::Once)?;
        let (h_td, _) = output.final_norm.forward(&x_td, cx);
        watch.end(0, is_finite(&h_td), "the final norm");
        let loss = output.head.forward(&h_td, cx)?;
        watch.end(1, loss.nll_sum.is_finite(), "the output head");
        Ok(None)
    }
}

impl<T: Trainable> Engine<T> {
    /// Looks for the place where the step that just failed ceased to be finite; every rank calls it, before
    /// anything is updated. The gradients are those of the failed step.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub(super) fn diagnose(&mut self, step: u64, micros: &[TokenBatch]) -> Result<Diagnosis, Error> {
        self.params.reshard();
        let (mut weight, mut gradient, mut forward) = (None, None, None);
        for id in self.params.ids() {
            self.look_at(id, &mut weight, &mut gradient);
        }
        let infos: Vec<TokenInfo> = micros.iter().map(|m| self.tokens(m)).collect::<Result<_, _>>()?;
        for (micro_batch, info) in infos.iter().enumerate() {
            self.watch_forward(step, info, (micro_batch, infos.len()), &mut forward)?;
        }
        self.params.reshard();
        let own = [forward, weight, gradient];
        let [forward, weight, gradient] = first_of_all(self.mesh.world(), &self.device, &own)?;
        Ok(Diagnosis { forward, weight, gradient })
    }

    /// Candidates of one parameter: pieces of its weight, then of its gradient in the reverse order.
    fn look_at(&self, id: ParamId, weight: &mut Candidate, gradient: &mut Candidate) {
        let index = self.params.ids().position(|other| other == id).unwrap_or_default() as u64;
        let place = (layer_of(&self.params.spec(id).name) << 24) + index;
        let held = self.params.held(id);
        let bad = |values: &[T]| values.iter().any(|v| !v.to_f64().is_finite());
        if let Some(piece) = held.pieces.iter().find(|piece| bad(&piece.copy_out(&held.tensor))) {
            earliest(weight, place, || piece.name.clone());
        }
        let held = self.grads.held(&self.params, id);
        let bad = |values: &[T::Acc]| values.iter().any(|v| !Float::to_f64(*v).is_finite());
        if let Some(piece) = held.pieces.iter().rev().find(|piece| bad(&piece.copy_out(&held.tensor))) {
            earliest(gradient, (u64::from(u32::MAX) << 25) - place, || piece.name.clone());
        }
    }

    /// One micro-batch through all stages, one after the other: those of other ranks by messages.
    fn watch_forward(
        &mut self,
        step: u64,
        info: &TokenInfo,
        (micro_batch, micro_batches): (usize, usize),
        found: &mut Candidate,
    ) -> Result<(), Error> {
        let own = self.mesh.coordinates().pp;
        let owners: Vec<usize> = match &self.pipeline {
            None => vec![own],
            Some(plan) => (0..plan.parts().len()).map(|stage| plan.schedule().rank_of_stage(stage)).collect(),
        };
        let layers = self.declared.iter().flatten().map(|spec| layer_of(&spec.name));
        let layers = layers.filter(|layer| *layer < u64::from(u32::MAX)).max().unwrap_or(0) as usize;
        let mut rows: Option<Tensor<T>> = None;
        for (stage, &owner) in owners.iter().enumerate().filter(|(_, owner)| **owner == own) {
            if stage > 0 && owners[stage - 1] != owner {
                let shape = [info.local_range().len(), self.width];
                let from = owners[stage - 1];
                let come = self.mesh.pp().receive::<T>(Purpose::Pipeline, &self.device, from, shape)?;
                rows = Some(come.with_category(Category::Activation));
            }
            let x_td = rows.take();
            let mut watch = Watch { found: &mut *found, layers, micro_batch, micro_batches };
            let y_td = self.with_cx(info, step, |model, cx| {
                let chunk = model.chunks.iter().find(|chunk| owners.len() == 1 || chunk.stage == stage);
                chunk.expect("a stage of this rank").watched(x_td, cx, &mut watch)
            })?;
            match owners.get(stage + 1) {
                Some(&next) if next != owner => {
                    self.mesh.pp().send(Purpose::Pipeline, &y_td.expect("rows for the next stage"), next)?;
                }
                _ => rows = y_td,
            }
        }
        Ok(())
    }
}
