//! Attention: whole and block by block, its gradients, joining parts, sinks. Sizes with one key, no rows, empty
//! documents, queries that see nothing, shared key heads, windows, runs of rows as context parallelism cuts them, and
//! several tiles of every kernel.

use std::ops::Range;

use super::twin::{Pair, close};
use super::{Cases, Twin, case};
use crate::bf16;
use crate::dtype::Float;
use crate::ops::attention::{
    AttentionGrads, AttentionSpec, Rows, apply_sinks, attention_backward, attention_block_backward,
    attention_block_forward, attention_forward, merge,
};
use crate::tensor::Tensor;

/// Sizes and mask of one call; rows of queries and keys are runs of the packed sequence.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    heads: usize,
    kv_heads: usize,
    d: usize,
    dv: usize,
    documents: &'static [usize],
    window: Option<usize>,
    sinks: bool,
    queries: &'static [Range<usize>],
    keys: &'static [Range<usize>],
}

/// All rows as queries and as keys.
const fn whole(heads: usize, kv_heads: usize, d: usize, dv: usize, documents: &'static [usize]) -> Sizes {
    Sizes { heads, kv_heads, d, dv, documents, window: None, sinks: false, queries: &[], keys: &[] }
}

/// On every type.
#[expect(clippy::single_range_in_vec_init, reason = "lists of runs, some of one run")]
const SIZES: [Sizes; 9] = [
    whole(2, 1, 5, 3, &[0, 0]),
    // One key, with a sink; `one_key` is without.
    Sizes { sinks: true, ..whole(2, 2, 3, 5, &[0, 1]) },
    whole(4, 2, 7, 6, &[0, 7, 8, 8, 19]),
    whole(1, 1, 40, 33, &[0, 3, 5, 66, 70, 131, 132]),
    Sizes { window: Some(3), ..whole(3, 3, 8, 8, &[0, 12, 43]) },
    Sizes { sinks: true, window: Some(70), ..whole(2, 1, 6, 5, &[0, 90, 90, 151]) },
    Sizes { sinks: true, queries: &[0..9, 60..70], keys: &[20..64], ..whole(4, 1, 6, 5, &[0, 30, 80]) },
    Sizes { queries: &[0..4], keys: &[4..8], sinks: true, ..whole(2, 1, 3, 3, &[0, 8]) },
    Sizes { queries: &[30..50], keys: &[0..0], ..whole(2, 1, 3, 3, &[0, 50]) },
];

fn count(runs: &[Range<usize>]) -> usize {
    runs.iter().map(Range::len).sum()
}

impl Sizes {
    fn rows(&self, runs: &'static [Range<usize>]) -> (Rows<'static>, usize) {
        match runs {
            [] => (Rows::From(0), self.documents[self.documents.len() - 1]),
            _ => (Rows::Runs(runs), count(runs)),
        }
    }

    fn spec(&self) -> AttentionSpec<'static> {
        let (queries, keys) = (self.rows(self.queries).0, self.rows(self.keys).0);
        let spec = AttentionSpec::causal((self.d as f64).powf(-0.5), self.documents);
        AttentionSpec { window: self.window, queries, keys, ..spec }
    }

    fn inputs<T: Float>(&self, twin: &Twin) -> Inputs<T> {
        let (queries, keys) = (self.rows(self.queries).1, self.rows(self.keys).1);
        Inputs {
            q: twin.normal([queries, self.heads, self.d], 1),
            k: twin.normal([keys, self.kv_heads, self.d], 2),
            v: twin.normal([keys, self.kv_heads, self.dv], 3),
            dout: twin.normal([queries, self.heads, self.dv], 4),
            sinks: self.sinks.then(|| twin.normal([self.heads], 5)),
        }
    }
}

struct Inputs<T: Float> {
    q: Pair<T>,
    k: Pair<T>,
    v: Pair<T>,
    dout: Pair<T>,
    sinks: Option<Pair<T>>,
}

/// The inputs on one side.
struct Side<'a, T: Float> {
    q: &'a Tensor<T>,
    k: &'a Tensor<T>,
    v: &'a Tensor<T>,
    dout: &'a Tensor<T>,
    sinks: Option<&'a Tensor<T>>,
}

impl<T: Float> Inputs<T> {
    fn cpu(&self) -> Side<'_, T> {
        let sinks = self.sinks.as_ref().map(|s| &s.cpu);
        Side { q: &self.q.cpu, k: &self.k.cpu, v: &self.v.cpu, dout: &self.dout.cpu, sinks }
    }

    fn gpu(&self) -> Side<'_, T> {
        let sinks = self.sinks.as_ref().map(|s| &s.gpu);
        Side { q: &self.q.gpu, k: &self.k.gpu, v: &self.v.gpu, dout: &self.dout.gpu, sinks }
    }
}

type Output<T, A> = (Tensor<T>, Tensor<A>);

impl<T: Float> Side<'_, T> {
    fn forward(&self, spec: &AttentionSpec<'_>) -> Output<T, T::Acc> {
        attention_forward(self.q, self.k, self.v, self.sinks, spec)
    }

    fn backward(&self, (out, lse): &Output<T, T::Acc>, spec: &AttentionSpec<'_>) -> AttentionGrads<T> {
        attention_backward(self.dout, self.q, self.k, self.v, self.sinks, out, lse, spec)
    }

    fn block_backward(
        &self,
        (out, lse): &Output<T, T::Acc>,
        spec: &AttentionSpec<'_>,
    ) -> AttentionGrads<T::Acc> {
        attention_block_backward(self.dout, self.q, self.k, self.v, self.sinks, out, lse, spec)
    }
}

fn close_grads<T: Float>(
    what: &str,
    cpu: &AttentionGrads<T>,
    gpu: &AttentionGrads<T>,
    factor: f64,
) -> Result<(), String> {
    close(&format!("{what} dq"), &cpu.dq, &gpu.dq, factor)?;
    close(&format!("{what} dk"), &cpu.dk, &gpu.dk, factor)?;
    close(&format!("{what} dv"), &cpu.dv, &gpu.dv, factor)?;
    match (&cpu.dsinks, &gpu.dsinks) {
        (Some(cpu), Some(gpu)) => close(&format!("{what} dsinks"), cpu, gpu, 10.0),
        (None, None) => Ok(()),
        _ => Err(format!("{what}: gradients by sinks on one side only")),
    }
}

/// Both forms of both passes. The backward of both sides gets the CPU's output, so that it is compared alone.
fn both_passes<T: Float>(twin: &Twin, sizes: &Sizes) -> Result<(), String> {
    let (x, spec, what) = (sizes.inputs::<T>(twin), sizes.spec(), format!("{sizes:?}"));
    let (cpu, gpu) = (x.cpu(), x.gpu());
    let (kept, got) = (cpu.forward(&spec), gpu.forward(&spec));
    close(&format!("{what} out"), &kept.0, &got.0, 4.0)?;
    close(&format!("{what} lse"), &kept.1, &got.1, 4.0)?;
    let block = |side: &Side<'_, T>| attention_block_forward(side.q, side.k, side.v, side.sinks, &spec);
    let (a, b) = (block(&cpu), block(&gpu));
    close(&format!("{what} block out"), &a.0, &b.0, 4.0)?;
    close(&format!("{what} block lse"), &a.1, &b.1, 4.0)?;
    let copies = (kept.0.to_device(&twin.gpu), kept.1.to_device(&twin.gpu));
    close_grads(&what, &cpu.backward(&kept, &spec), &gpu.backward(&copies, &spec), 8.0)?;
    let (a, b) = (cpu.block_backward(&kept, &spec), gpu.block_backward(&copies, &spec));
    close_grads(&format!("{what} block"), &a, &b, 8.0)
}

/// Rows that begin at odd addresses: views behind one row of an odd number of elements.
fn unaligned<T: Float>(twin: &Twin) -> Result<(), String> {
    let sizes = whole(3, 1, 5, 7, &[0, 20, 41]);
    let (x, spec) = (sizes.inputs::<T>(twin), sizes.spec());
    let view = |pair: &Pair<T>| {
        let shape = pair.cpu.shape();
        let longer = twin.normal::<T>(shape.with_rows(shape.dims()[0] + 1), 9);
        let rows = 1..shape.dims()[0] + 1;
        Pair { cpu: longer.cpu.slice_rows(rows.clone()), gpu: longer.gpu.slice_rows(rows) }
    };
    let x = Inputs { q: view(&x.q), k: view(&x.k), v: view(&x.v), dout: view(&x.dout), sinks: None };
    let (kept, got) = (x.cpu().forward(&spec), x.gpu().forward(&spec));
    close("out of views", &kept.0, &got.0, 4.0)?;
    let copies = (kept.0.to_device(&twin.gpu), kept.1.to_device(&twin.gpu));
    close_grads("views", &x.cpu().backward(&kept, &spec), &x.gpu().backward(&copies, &spec), 8.0)
}

/// Parts of which some rows, or both, saw nothing; garbage in what does not count.
fn parts<A: crate::dtype::Real>(twin: &Twin) -> Result<(), String> {
    for (t, heads, dv) in [(0, 2, 3), (1, 1, 1), (37, 3, 33), (70, 4, 8)] {
        let shape = [t, heads, dv];
        let (a, b) = (twin.normal::<A>(shape, 1), twin.normal::<A>(shape, 2));
        let lse = |seed: u64, every: usize| {
            let mut values = twin.normal::<A>([t, heads], seed).cpu.to_vec();
            values.iter_mut().step_by(every).for_each(|x| *x = A::neg_infinity());
            twin.values([t, heads], &values)
        };
        let (la, lb) = (lse(3, 3), lse(4, 5));
        let cpu = merge(&a.cpu, &la.cpu, &b.cpu, &lb.cpu);
        let gpu = merge(&a.gpu, &la.gpu, &b.gpu, &lb.gpu);
        close("merged out", &cpu.0, &gpu.0, 2.0)?;
        close("merged lse", &cpu.1, &gpu.1, 2.0)?;
    }
    let nothing = twin.values([2, 1], &[A::neg_infinity(); 2]);
    let (garbage, value) =
        (twin.values([2, 1, 1], &[A::nan(), A::infinity()]), twin.normal::<A>([2, 1, 1], 6));
    let weight = twin.normal::<A>([2, 1], 7);
    let cpu = merge(&garbage.cpu, &nothing.cpu, &value.cpu, &weight.cpu);
    let gpu = merge(&garbage.gpu, &nothing.gpu, &value.gpu, &weight.gpu);
    super::twin::same("beside garbage", &cpu.0, &gpu.0)
}

fn sinks<T: Float>(twin: &Twin) -> Result<(), String> {
    for (t, heads, dv) in [(0, 2, 3), (1, 1, 1), (37, 3, 33)] {
        let (out, sinks) = (twin.normal::<T::Acc>([t, heads, dv], 1), twin.normal::<T>([heads], 2));
        let mut values = twin.normal::<T::Acc>([t, heads], 3).cpu.to_vec();
        values.iter_mut().step_by(4).for_each(|x| *x = num_traits::Float::neg_infinity());
        let lse = twin.values([t, heads], &values);
        let Pair { mut cpu, mut gpu } = out;
        apply_sinks(&mut cpu, &lse.cpu, &sinks.cpu);
        apply_sinks(&mut gpu, &lse.gpu, &sinks.gpu);
        close("with sinks", &cpu, &gpu, 2.0)?;
    }
    Ok(())
}

/// Twice the same bits.
fn repeats<T: Float>(twin: &Twin) -> Result<(), String> {
    let sizes = whole(2, 1, 8, 8, &[0, 40, 133]);
    let (x, spec) = (sizes.inputs::<T>(twin), sizes.spec());
    let run = || {
        let kept = x.gpu().forward(&spec);
        x.gpu().backward(&kept, &spec)
    };
    let (a, b) = (run(), run());
    super::twin::same("dq again", &a.dq, &b.dq)?;
    super::twin::same("dk again", &a.dk, &b.dk)?;
    super::twin::same("dv again", &a.dv, &b.dv)
}

/// Queries that see one key each, themselves: the output is the value, and no score has a gradient, exactly.
fn one_key<T: Float>(twin: &Twin) -> Result<(), String> {
    let sizes = whole(4, 2, 7, 6, &[0, 1, 2, 3]);
    let (x, spec) = (sizes.inputs::<T>(twin), sizes.spec());
    let kept = x.gpu().forward(&spec);
    let grads = x.gpu().backward(&kept, &spec);
    for (name, grad) in [("dq", &grads.dq), ("dk", &grads.dk)] {
        if let Some(value) = grad.to_vec().iter().find(|value| value.to_f64() != 0.0) {
            return Err(format!("{name} of one key holds {value:?}"));
        }
    }
    close("dv of one key", &x.cpu().backward(&x.cpu().forward(&spec), &spec).dv, &grads.dv, 8.0)
}

fn of_type<T: Float>(cases: &mut Cases) {
    case(cases, format!("attention: both passes {}", T::DTYPE), |twin| {
        SIZES.iter().try_for_each(|sizes| both_passes::<T>(twin, sizes))
    });
    case(cases, format!("attention: unaligned rows {}", T::DTYPE), unaligned::<T>);
    case(cases, format!("attention: one key a query {}", T::DTYPE), one_key::<T>);
    case(cases, format!("attention: sinks {}", T::DTYPE), sinks::<T>);
    case(cases, format!("attention: the same bits again {}", T::DTYPE), repeats::<T>);
    case(cases, format!("attention: merge {}", T::DTYPE), parts::<T::Acc>);
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<f32>(cases);
    of_type::<f64>(cases);
    of_type::<bf16>(cases);
}
