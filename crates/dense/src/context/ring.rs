//! Ring attention: in hop i rank r works with the keys and values of rank r - i, while they already travel on to
//! rank r + 1. The outputs of the hops are merged by their log-sum-exp in the accumulator type and rounded once. The
//! backward sends keys and values round once more and computes with the merged output and log-sum-exp; the
//! gradients of a block start at the first foreign rank, travel with it in the accumulator type, and the last rank
//! sends them home, where the home's own part waits. A block that no query of a rank sees costs no arithmetic.
//!
//! Sent a rank, with n = T·kv·d elements of q bytes and a bytes of the accumulator: forward (c-1)·2nq, backward
//! (c-1)·(2nq + 2na). Messages of both directions of time are matched by hop order and four tags.

use plica_comm::{Group, Message, Pending, PendingSend, Purpose};
use plica_kernels::ops::attention::{self, AttentionSpec, Rows};
use plica_kernels::ops::elementwise;
use plica_kernels::{Category, Device, Float, Shape, Tensor};

use super::{ContextAttention, ContextSaved, Heads, Mask};
use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::phases::Phase;

/// Tag of the keys; the values have the next one.
const BLOCK_TAG: u64 = 0;
/// Tag of the keys' gradients; those of the values have the next one.
const GRADIENT_TAG: u64 = 2;

/// Keys and values travel round.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ring;

/// Two tensors on their way: out to the next rank, in from the one before.
struct Hop<A: Message> {
    incoming: [Pending<A>; 2],
    outgoing: [PendingSend; 2],
}

impl<A: Message> Hop<A> {
    /// Waits for both ends.
    fn arrive<T: Float>(self, cx: &Cx<T>) -> Result<[Tensor<A>; 2], Error> {
        let next = arrive(self.incoming, cx)?;
        sent(self.outgoing, cx)?;
        Ok(next)
    }
}

fn send<A: Message>(group: &Group, pair: [&Tensor<A>; 2], tag: u64) -> Result<[PendingSend; 2], Error> {
    let next = (group.rank() + 1) % group.size();
    let start = |x: &Tensor<A>, tag| group.send_start(Purpose::ContextRing, x, next, tag);
    Ok([start(pair[0], tag)?, start(pair[1], tag + 1)?])
}

fn receive<A: Message>(
    group: &Group,
    device: &Device,
    shapes: [Shape; 2],
    tag: u64,
) -> Result<[Pending<A>; 2], Error> {
    let before = (group.rank() + group.size() - 1) % group.size();
    let start = |shape, tag| group.receive_start(Purpose::ContextRing, device, before, tag, shape);
    Ok([start(shapes[0], tag)?, start(shapes[1], tag + 1)?])
}

fn arrive<A: Message, T: Float>(incoming: [Pending<A>; 2], cx: &Cx<T>) -> Result<[Tensor<A>; 2], Error> {
    let _phase = cx.phase(Phase::CpComm);
    let [a, b] = incoming;
    Ok([a.finish()?, b.finish()?])
}

fn sent<T: Float>(outgoing: [PendingSend; 2], cx: &Cx<T>) -> Result<(), Error> {
    let _phase = cx.phase(Phase::CpComm);
    for message in outgoing {
        message.finish()?;
    }
    Ok(())
}

/// The block that the rank works with next.
enum Next<T: Trainable> {
    /// On its way while the rank works with the present one.
    Moving(Hop<T>),
    /// Here: without overlap it is waited for first.
    Arrived([Tensor<T>; 2]),
}

/// The keys and values that a rank works with, hop by hop.
struct Travel<T: Trainable> {
    block: [Tensor<T>; 2],
    hop: usize,
    next: Option<Next<T>>,
}

impl<T: Trainable> Travel<T> {
    fn new(k_thd: &Tensor<T>, v_thd: &Tensor<T>) -> Travel<T> {
        Travel { block: [k_thd.clone(), v_thd.clone()], hop: 0, next: None }
    }

    /// Starts to pass the present block on, unless it has been everywhere.
    fn depart(&mut self, cx: &Cx<T>) -> Result<(), Error> {
        let group = cx.mesh.cp();
        if self.hop + 1 < group.size() {
            let [k, v] = &self.block;
            let outgoing = send(group, [k, v], BLOCK_TAG)?;
            let incoming = receive(group, k.device(), [k.shape(), v.shape()], BLOCK_TAG)?;
            let hop = Hop { incoming, outgoing };
            self.next = Some(match cx.overlap().is_on() {
                true => Next::Moving(hop),
                false => Next::Arrived(hop.arrive(cx)?),
            });
        }
        Ok(())
    }

    /// Takes the next block, once the arithmetic on the present one is done; false where there is none.
    fn advance(&mut self, cx: &Cx<T>) -> Result<bool, Error> {
        self.block = match self.next.take() {
            None => return Ok(false),
            Some(Next::Moving(hop)) => hop.arrive(cx)?,
            Some(Next::Arrived(block)) => block,
        };
        self.hop += 1;
        Ok(true)
    }

    /// The rank whose block this is.
    fn owner(&self, group: &Group) -> usize {
        (group.rank() + group.size() - self.hop) % group.size()
    }
}

/// Whether a query sees a key of the block at all.
fn is_visible<T: Float>(spec: &AttentionSpec<'_>, q_thd: &Tensor<T>, k_thd: &Tensor<T>) -> bool {
    spec.visible_pairs(q_thd.rows(), k_thd.rows()) > 0
}

impl<T: Trainable> ContextAttention<T> for Ring {
    fn forward(
        &self,
        heads: Heads<T>,
        mask: &Mask,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T>, ContextSaved<T>), Error> {
        let (group, cut) = (cx.mesh.cp(), cx.tokens.cut());
        let mut travel = Travel::new(&heads.k_thd, &heads.v_thd);
        let mut merged: Option<(Tensor<T::Acc>, Tensor<T::Acc>)> = None;
        loop {
            travel.depart(cx)?;
            let runs = cut.runs(travel.owner(group));
            let spec = mask.spec(cx, Rows::Runs(&cx.tokens.runs), Rows::From(0));
            let spec = AttentionSpec { keys: Rows::Runs(&runs), ..spec };
            let [k_thd, v_thd] = &travel.block;
            if merged.is_none() || is_visible(&spec, &heads.q_thd, k_thd) {
                let _phase = cx.phase(Phase::Attention);
                let part = attention::attention_block_forward(&heads.q_thd, k_thd, v_thd, None, &spec);
                merged = Some(match merged {
                    None => part,
                    Some((out, lse)) => attention::merge(&out, &lse, &part.0, &part.1),
                });
            }
            if !travel.advance(cx)? {
                break;
            }
        }
        let (out_thd, lse_th) = merged.expect("the first hop is always computed");
        let out_thd: Tensor<T> = elementwise::rounded(out_thd);
        Ok((out_thd.clone(), ContextSaved { heads, out_thd, lse_th }))
    }

    fn backward(
        &self,
        saved: ContextSaved<T>,
        dout_thd: Tensor<T>,
        mask: &Mask,
        cx: &Cx<T>,
    ) -> Result<Heads<T>, Error> {
        let (group, cut) = (cx.mesh.cp(), cx.tokens.cut());
        let ContextSaved { heads: Heads { q_thd, k_thd, v_thd }, out_thd, lse_th } = saved;
        let mut travel = Travel::new(&k_thd, &v_thd);
        let mut gradients = Gradients::new(&k_thd, &v_thd);
        drop((k_thd, v_thd));
        let mut dq: Option<Tensor<T::Acc>> = None;
        loop {
            travel.depart(cx)?;
            gradients.depart(travel.hop, cx)?;
            let runs = cut.runs(travel.owner(group));
            let spec = mask.spec(cx, Rows::Runs(&cx.tokens.runs), Rows::From(0));
            let spec = AttentionSpec { keys: Rows::Runs(&runs), ..spec };
            let [k_thd, v_thd] = &travel.block;
            let part = (travel.hop == 0 || is_visible(&spec, &q_thd, k_thd)).then(|| {
                let _phase = cx.phase(Phase::Attention);
                attention::attention_block_backward(
                    &dout_thd, &q_thd, k_thd, v_thd, None, &out_thd, &lse_th, &spec,
                )
            });
            let part = part.map(|grads| {
                match &mut dq {
                    None => dq = Some(grads.dq),
                    Some(sum) => elementwise::add_assign(sum, &grads.dq),
                }
                [grads.dk, grads.dv]
            });
            gradients.add(travel.hop, part, cx)?;
            if !travel.advance(cx)? {
                break;
            }
        }
        let [dk, dv] = gradients.home(cx)?;
        let q_thd = elementwise::rounded(dq.expect("the first hop is always computed"));
        Ok(Heads { q_thd, k_thd: elementwise::rounded(dk), v_thd: elementwise::rounded(dv) })
    }
}

/// Gradients of keys and values: the own part at home, and those of the block that is here.
struct Gradients<T: Trainable> {
    shapes: [Shape; 2],
    device: Device,
    home: Option<[Tensor<T::Acc>; 2]>,
    /// Of the block that is here, where they were waited for ahead of the arithmetic.
    here: Option<[Tensor<T::Acc>; 2]>,
    incoming: Option<[Pending<T::Acc>; 2]>,
    outgoing: Option<[PendingSend; 2]>,
}

impl<T: Trainable> Gradients<T> {
    fn new(k_thd: &Tensor<T>, v_thd: &Tensor<T>) -> Gradients<T> {
        let shapes = [k_thd.shape(), v_thd.shape()];
        Gradients {
            shapes,
            device: k_thd.device().clone(),
            home: None,
            here: None,
            incoming: None,
            outgoing: None,
        }
    }

    fn expect(&mut self, group: &Group) -> Result<(), Error> {
        self.incoming = Some(receive(group, &self.device, self.shapes, GRADIENT_TAG)?);
        Ok(())
    }

    /// Asks for the gradients of the block of this hop; without overlap waits for them. The first foreign rank begins
    /// them, so that nothing comes with hop 1.
    fn depart(&mut self, hop: usize, cx: &Cx<T>) -> Result<(), Error> {
        if hop >= 2 {
            self.expect(cx.mesh.cp())?;
            if !cx.overlap().is_on() {
                self.here = self.arrived(cx)?;
            }
        }
        Ok(())
    }

    /// Takes up what this rank adds to the block of a hop and sends the sum on; `None` adds nothing.
    fn add(&mut self, hop: usize, part: Option<[Tensor<T::Acc>; 2]>, cx: &Cx<T>) -> Result<(), Error> {
        if hop == 0 {
            self.home = part;
            return Ok(());
        }
        let came = match self.here.take() {
            Some(here) => Some(here),
            None => self.arrived(cx)?,
        };
        let sum = match (came, part) {
            (None, Some(part)) => part.map(|gradient| gradient.with_category(Category::CommBuffer)),
            (None, None) => self.shapes.map(|s| Tensor::zeros(&self.device, s, Category::CommBuffer)),
            (Some(sum), None) => sum,
            (Some(sum), Some(part)) => added(sum, &part),
        };
        self.outgoing = Some(send(cx.mesh.cp(), [&sum[0], &sum[1]], GRADIENT_TAG)?);
        Ok(())
    }

    /// What was asked for, once it is here; then the message before is over too.
    fn arrived(&mut self, cx: &Cx<T>) -> Result<Option<[Tensor<T::Acc>; 2]>, Error> {
        let incoming = self.incoming.take().map(|incoming| arrive(incoming, cx)).transpose()?;
        if let Some(outgoing) = self.outgoing.take() {
            sent(outgoing, cx)?;
        }
        Ok(incoming)
    }

    /// The own part and what the others added on the way.
    fn home(mut self, cx: &Cx<T>) -> Result<[Tensor<T::Acc>; 2], Error> {
        self.expect(cx.mesh.cp())?;
        let travelled = self.arrived(cx)?.expect("it was asked for");
        let home = self.home.expect("the first hop is the own block");
        Ok(added(home, &travelled))
    }
}

fn added<A: Float>(mut sums: [Tensor<A>; 2], parts: &[Tensor<A>; 2]) -> [Tensor<A>; 2] {
    sums.iter_mut().zip(parts).for_each(|(sum, part)| elementwise::add_assign(sum, part));
    sums
}
