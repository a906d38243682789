//! A collective with inputs that are formulas, so that every rank can compute what each of them must get.
//! `rows[source][target]` are the rows of an all-to-all; the others use a column or a row of that matrix.

use plica_kernels::ops::elementwise::Summable;
use plica_kernels::rng::{Purpose as Draw, Stream};
use plica_kernels::{Category, DType, Element, Float, Tensor, bf16};

use super::{ensure, same_bits};
use crate::communicator::{Purpose, Reduce};
use crate::error::CommError;
use crate::group::Group;
use crate::launch::BoxError;
use crate::payload::Message;
use crate::pending::Pending;

/// An element type with values drawn for tests: fractions for floats, so that the order of a sum shows.
pub(super) trait Sample: Message {
    fn draw(stream: &Stream, index: u64) -> Self;

    /// Whether two sums of `terms` drawn values are equal but for the order and the rounding of their additions.
    fn is_near(self, other: Self, terms: usize) -> bool;
}

/// Largest absolute value that is drawn for floats.
const LARGEST: f64 = 4.0;

macro_rules! sample {
    (float $($t:ty),*) => {$(
        impl Sample for $t {
            fn draw(stream: &Stream, index: u64) -> Self {
                <$t as Float>::from_f64(8.0 * stream.uniform(index) - 4.0)
            }

            fn is_near(self, other: Self, terms: usize) -> bool {
                let rounding = match <$t as Element>::DTYPE {
                    DType::F64 => f64::EPSILON,
                    DType::F32 => f64::from(f32::EPSILON),
                    _ => 1.0 / 128.0, // bf16
                };
                let far = (Float::to_f64(self) - Float::to_f64(other)).abs();
                far <= rounding * LARGEST * (terms * terms) as f64
            }
        }
    )*};
    (integer $($t:ty),*) => {$(
        impl Sample for $t {
            fn draw(stream: &Stream, index: u64) -> Self {
                stream.below(index, 40) as $t
            }

            fn is_near(self, other: Self, _: usize) -> bool {
                self == other
            }
        }
    )*};
}
sample!(float f32, f64, bf16);
sample!(integer i32, i64, u8);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AllReduce(Reduce),
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast(usize),
}

impl Kind {
    /// Every kind, for a group of that size.
    pub(super) fn all(size: usize) -> Vec<Kind> {
        vec![
            Kind::AllReduce(Reduce::Sum),
            Kind::AllReduce(Reduce::Max),
            Kind::AllReduce(Reduce::Min),
            Kind::AllGather,
            Kind::ReduceScatter,
            Kind::AllToAll,
            Kind::Broadcast(size - 1),
        ]
    }
}

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) kind: Kind,
    pub(super) rows: Vec<Vec<usize>>,
    pub(super) columns: usize,
    pub(super) seed: u64,
}

impl Plan {
    fn gathered_rows(&self) -> Vec<usize> {
        self.rows.iter().map(|r| r[0]).collect()
    }

    fn input_rows(&self, member: usize) -> usize {
        match self.kind {
            Kind::AllReduce(_) | Kind::Broadcast(_) => self.rows[0][0],
            Kind::AllGather => self.rows[member][0],
            Kind::ReduceScatter => self.rows[0].iter().sum(),
            Kind::AllToAll => self.rows[member].iter().sum(),
        }
    }

    /// Flat input of a member.
    pub(super) fn input<T: Sample>(&self, member: usize) -> Vec<T> {
        let stream = Stream::new(self.seed + member as u64, Draw::Named("input of a member"));
        (0..self.input_rows(member) * self.columns).map(|i| T::draw(&stream, i as u64)).collect()
    }

    /// Starts the collective on a group.
    pub(super) fn start<T: Sample>(&self, group: &Group, purpose: Purpose) -> Result<Pending<T>, CommError> {
        let own = group.rank();
        let shape = [self.input_rows(own), self.columns];
        let x = Tensor::from_slice(group.device(), shape, &self.input::<T>(own), Category::Activation);
        match self.kind {
            Kind::AllReduce(op) => group.all_reduce_start(purpose, &x, op),
            Kind::AllGather => group.all_gather_rows_start(purpose, &x, &self.gathered_rows()),
            Kind::ReduceScatter => group.reduce_scatter_rows_start(purpose, &x, &self.rows[0]),
            Kind::AllToAll => {
                let receive: Vec<usize> = self.rows.iter().map(|r| r[own]).collect();
                group.all_to_all_start(purpose, &x, &self.rows[own], &receive)
            }
            Kind::Broadcast(root) => group.broadcast_start(purpose, &x, root),
        }
    }

    /// Errors unless an output is what the own rank must get: to the bit, but for sums over a backend that adds in an
    /// order of its own.
    pub(super) fn check<T: Sample>(
        &self,
        what: &str,
        group: &Group,
        got: &Tensor<T>,
    ) -> Result<(), BoxError> {
        let expected = self.expected::<T>(group.rank(), group.size());
        let is_sum = matches!(self.kind, Kind::AllReduce(Reduce::Sum) | Kind::ReduceScatter);
        if !is_sum || group.sums_in_rank_order() {
            return same_bits(what, got, &expected);
        }
        let got = got.to_vec();
        let near = got.len() == expected.len()
            && got.iter().zip(&expected).all(|(a, b)| a.is_near(*b, group.size()));
        ensure(near, || format!("{what}: got {got:?}, expected about {expected:?}"))
    }

    /// What a member of a group of `size` must get.
    pub(super) fn expected<T: Sample>(&self, own: usize, size: usize) -> Vec<T> {
        let inputs: Vec<Vec<T>> = (0..size).map(|m| self.input(m)).collect();
        let rows_of = |m: usize, first: usize, count: usize| {
            inputs[m][first * self.columns..(first + count) * self.columns].to_vec()
        };
        match self.kind {
            Kind::AllReduce(op) => reduced(&inputs, op),
            Kind::AllGather => inputs.concat(),
            Kind::ReduceScatter => {
                let first: usize = self.rows[0][..own].iter().sum();
                let sum = reduced(&inputs, Reduce::Sum);
                sum[first * self.columns..(first + self.rows[0][own]) * self.columns].to_vec()
            }
            Kind::AllToAll => {
                let part = |m: usize| rows_of(m, self.rows[m][..own].iter().sum(), self.rows[m][own]);
                (0..size).flat_map(part).collect()
            }
            Kind::Broadcast(root) => inputs[root].clone(),
        }
    }
}

/// Element-wise reduction in the order of the inputs, in the accumulator.
fn reduced<T: Sample>(inputs: &[Vec<T>], op: Reduce) -> Vec<T> {
    let element = |i: usize| {
        let values = || inputs.iter().map(|x| x[i]);
        match op {
            Reduce::Sum => T::narrow(values().map(Summable::widen).reduce(|a, b| a + b).expect("a member")),
            Reduce::Max => values().reduce(|a, b| if b > a { b } else { a }).expect("a member"),
            Reduce::Min => values().reduce(|a, b| if b < a { b } else { a }).expect("a member"),
        }
    };
    (0..inputs[0].len()).map(element).collect()
}
