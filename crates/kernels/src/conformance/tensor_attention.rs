//! Attention of bf16 on tensor cores against the definition in f64, element by element. Probabilities and dS are
//! rounded to bf16 before the second product, and the result once: an element may be off by 2^-8 of the sum of its
//! terms' magnitudes, by 2^-8 of itself where it is bf16, and by what sums in f32 explain. The CPU twin, which keeps f32
//! probabilities, must be as near. The backward gets the CPU's output and log-sum-exp, rounded as they are.

use std::ops::Range;

use super::twin::{Pair, same};
use super::{Cases, Twin, case};
use crate::bf16;
use crate::dtype::Float;
use crate::ops::attention::{
    AttentionSpec, Rows, attention_backward, attention_block_backward, attention_block_forward,
    attention_forward,
};
use crate::tensor::Tensor;

/// Half of the distance of neighbouring bf16 values, relative.
const ROUNDING: f64 = 1.0 / 256.0;
/// Sums of some hundred terms in f32, and exponentials, relative to the terms.
const SUMS: f64 = 2e-5;

#[derive(Clone, Copy, Debug)]
struct Sizes {
    heads: usize,
    kv_heads: usize,
    d: usize,
    documents: &'static [usize],
    window: Option<usize>,
    sinks: bool,
    queries: &'static [Range<usize>],
    keys: &'static [Range<usize>],
}

const fn sizes(
    (heads, kv_heads, d): (usize, usize, usize),
    documents: &'static [usize],
    queries: &'static [Range<usize>],
    keys: &'static [Range<usize>],
) -> Sizes {
    Sizes { heads, kv_heads, d, documents, window: None, sinks: false, queries, keys }
}

/// One key, odd ends, tiles that are all visible, empty documents, shares of a ring, queries that see nothing, no keys.
#[expect(clippy::single_range_in_vec_init, reason = "lists of runs, some of one run")]
const SIZES: [Sizes; 9] = [
    sizes((1, 1, 64), &[0, 1], &[0..1], &[0..1]),
    sizes((4, 2, 64), &[0, 7, 8, 8, 83, 151], &[0..151], &[0..151]),
    sizes((1, 1, 128), &[0, 205], &[0..205], &[0..205]),
    sizes((2, 2, 96), &[0, 130, 161], &[0..161], &[0..161]),
    Sizes { window: Some(40), sinks: true, ..sizes((2, 1, 96), &[0, 140, 150], &[0..150], &[0..150]) },
    Sizes { sinks: true, ..sizes((2, 1, 64), &[0, 160, 280], &[0..70, 210..280], &[70..140, 140..210]) },
    Sizes { sinks: true, ..sizes((1, 1, 128), &[0, 100], &[0..30], &[20..100]) },
    sizes((2, 1, 64), &[0, 80], &[0..30], &[30..80]),
    sizes((2, 1, 64), &[0, 50], &[30..50], &[0..0]),
];

/// Values, the sum of the magnitudes of what they are made of, and that of what those are made of: dS is a difference
/// of sums, whose errors in f32 go by their own terms.
struct Sums {
    values: Vec<f64>,
    magnitudes: Vec<f64>,
    noise: Vec<f64>,
}

impl Sums {
    fn new(len: usize) -> Sums {
        Sums { values: vec![0.0; len], magnitudes: vec![0.0; len], noise: vec![0.0; len] }
    }

    fn add(&mut self, at: usize, value: f64, noise: f64) {
        self.values[at] += value;
        self.magnitudes[at] += value.abs();
        self.noise[at] += noise.abs();
    }

    /// Whether `got` is within the bound of its type.
    fn check<T: Float>(&self, what: &str, got: &Tensor<T>) -> Result<(), String> {
        let own = if T::DTYPE == crate::DType::Bf16 { ROUNDING } else { 0.0 };
        for (i, got) in got.to_vec().into_iter().map(T::to_f64).enumerate() {
            let (value, sum) = (self.values[i], self.magnitudes[i]);
            let bound = ROUNDING * (1.0 + ROUNDING) * sum + own * value.abs() * 1.01 + SUMS * self.noise[i];
            // Also false for what is no number.
            let near = (got - value).abs() <= bound;
            if !near {
                return Err(format!("{what}: element {i} is {got}, should be {value} within {bound}"));
            }
        }
        Ok(())
    }
}

fn wide<T: Float>(x: &Tensor<T>) -> Vec<f64> {
    x.to_vec().into_iter().map(T::to_f64).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn magnitude(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum()
}

struct Inputs {
    sizes: Sizes,
    q: Pair<bf16>,
    k: Pair<bf16>,
    v: Pair<bf16>,
    dout: Pair<bf16>,
    sinks: Option<Pair<bf16>>,
}

/// Output and log-sum-exp, and the gradients, by the definition.
struct Exact {
    out: Sums,
    lse: Vec<f64>,
    dq: Sums,
    dk: Sums,
    dv: Sums,
}

impl Inputs {
    fn new(twin: &Twin, sizes: Sizes) -> Inputs {
        let rows = |runs: &[Range<usize>]| runs.iter().map(Range::len).sum::<usize>();
        let (queries, keys, Sizes { heads, kv_heads, d, .. }) =
            (rows(sizes.queries), rows(sizes.keys), sizes);
        Inputs {
            sizes,
            q: twin.normal([queries, heads, d], 1),
            k: twin.normal([keys, kv_heads, d], 2),
            v: twin.normal([keys, kv_heads, d], 3),
            dout: twin.normal([queries, heads, d], 4),
            sinks: sizes.sinks.then(|| twin.normal([heads], 5)),
        }
    }

    fn spec(&self) -> AttentionSpec<'static> {
        let Sizes { d, documents, window, queries, keys, .. } = self.sizes;
        let spec = AttentionSpec::causal((d as f64).powf(-0.5), documents);
        AttentionSpec { window, queries: Rows::Runs(queries), keys: Rows::Runs(keys), ..spec }
    }

    fn sees(&self, query: usize, key: usize) -> bool {
        let document = |row: usize| self.sizes.documents.iter().filter(|d| **d <= row).count();
        let near = self.sizes.window.is_none_or(|w| query < key + w);
        key <= query && document(key) == document(query) && near
    }

    /// `out` and `lse` are what the backward is given; without them it computes with its own.
    fn exact(&self, given: Option<(&[f64], &[f64])>) -> Exact {
        let Sizes { heads, kv_heads, d, .. } = self.sizes;
        let (q, k, v, dout) = (wide(&self.q.cpu), wide(&self.k.cpu), wide(&self.v.cpu), wide(&self.dout.cpu));
        let sinks = self.sinks.as_ref().map(|s| wide(&s.cpu));
        let (scale, mut lse) = (self.spec().scale, Vec::new());
        let (mut out, mut dq) = (Sums::new(q.len()), Sums::new(q.len()));
        let (mut dk, mut dv) = (Sums::new(k.len()), Sums::new(v.len()));
        for (i, query) in self.sizes.queries.iter().cloned().flatten().enumerate() {
            for head in 0..heads {
                let at = (i * heads + head) * d;
                let rows: Vec<(usize, f64)> = self
                    .sizes
                    .keys
                    .iter()
                    .cloned()
                    .flatten()
                    .enumerate()
                    .filter(|(_, key)| self.sees(query, *key))
                    .map(|(j, _)| (j * kv_heads + head / (heads / kv_heads)) * d)
                    .map(|row| (row, scale * dot(&q[at..at + d], &k[row..row + d])))
                    .collect();
                let own = rows.iter().map(|(_, score)| score.exp()).sum::<f64>().ln();
                lse.push(own);
                let (given_out, own) =
                    given.map_or((&[][..], own), |(o, l)| (&o[at..at + d], l[i * heads + head]));
                let total = sinks.as_ref().map_or(own, |s| (own.exp() + s[head].exp()).ln());
                let delta = if given.is_some() { dot(&dout[at..at + d], given_out) } else { 0.0 };
                for (row, score) in rows {
                    let p = (score - total).exp();
                    let (dout_row, v_row) = (&dout[at..at + d], &v[row..row + d]);
                    let ds = scale * p * (dot(dout_row, v_row) - delta);
                    let noise = scale * p * (magnitude(dout_row, v_row) + magnitude(dout_row, given_out));
                    for x in 0..d {
                        out.add(at + x, p * v[row + x], p * v[row + x]);
                        dv.add(row + x, p * dout[at + x], p * dout[at + x]);
                        dq.add(at + x, ds * k[row + x], noise * k[row + x]);
                        dk.add(row + x, ds * q[at + x], noise * q[at + x]);
                    }
                }
            }
        }
        Exact { out, lse, dq, dk, dv }
    }
}

fn lse_is_near(what: &str, exact: &[f64], got: &Tensor<f32>) -> Result<(), String> {
    for (i, (exact, got)) in exact.iter().zip(wide(got)).enumerate() {
        // -inf equals itself.
        let near = *exact == got || (exact - got).abs() <= 1e-5;
        if !near {
            return Err(format!("{what} lse: element {i} is {got}, should be {exact}"));
        }
    }
    Ok(())
}

fn both_passes(twin: &Twin, sizes: Sizes) -> Result<(), String> {
    let (x, what) = (Inputs::new(twin, sizes), format!("{sizes:?}"));
    let (spec, exact) = (x.spec(), x.exact(None));
    let (cpu_sinks, gpu_sinks) = (x.sinks.as_ref().map(|s| &s.cpu), x.sinks.as_ref().map(|s| &s.gpu));
    let kept = attention_forward(&x.q.cpu, &x.k.cpu, &x.v.cpu, cpu_sinks, &spec);
    let got = attention_forward(&x.q.gpu, &x.k.gpu, &x.v.gpu, gpu_sinks, &spec);
    let block = attention_block_forward(&x.q.gpu, &x.k.gpu, &x.v.gpu, gpu_sinks, &spec);
    exact.out.check(&format!("{what} out of the CPU"), &kept.0)?;
    exact.out.check(&format!("{what} out"), &got.0)?;
    exact.out.check(&format!("{what} block out"), &block.0)?;
    for lse in [&kept.1, &got.1, &block.1] {
        lse_is_near(&what, &exact.lse, lse)?;
    }
    let exact = x.exact(Some((&wide(&kept.0), &wide(&kept.1))));
    let (out, lse) = (kept.0.to_device(&twin.gpu), kept.1.to_device(&twin.gpu));
    let cpu =
        attention_backward(&x.dout.cpu, &x.q.cpu, &x.k.cpu, &x.v.cpu, cpu_sinks, &kept.0, &kept.1, &spec);
    let (q, k, v, dout) = (&x.q.gpu, &x.k.gpu, &x.v.gpu, &x.dout.gpu);
    let gpu = attention_backward(dout, q, k, v, gpu_sinks, &out, &lse, &spec);
    for (whose, grads) in [(" of the CPU", &cpu), ("", &gpu)] {
        exact.dq.check(&format!("{what} dq{whose}"), &grads.dq)?;
        exact.dk.check(&format!("{what} dk{whose}"), &grads.dk)?;
        exact.dv.check(&format!("{what} dv{whose}"), &grads.dv)?;
    }
    let block = attention_block_backward(dout, q, k, v, gpu_sinks, &out, &lse, &spec);
    exact.dq.check(&format!("{what} block dq"), &block.dq)?;
    exact.dk.check(&format!("{what} block dk"), &block.dk)?;
    exact.dv.check(&format!("{what} block dv"), &block.dv)?;
    if sizes.heads < 4 {
        return Ok(());
    }
    let again = attention_backward(dout, q, k, v, gpu_sinks, &out, &lse, &spec);
    same(&format!("{what} dq again"), &gpu.dq, &again.dq)?;
    same(&format!("{what} dk again"), &gpu.dk, &again.dk)?;
    same(&format!("{what} dv again"), &gpu.dv, &again.dv)
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    for sizes in SIZES {
        let Sizes { heads, kv_heads, d, documents, .. } = sizes;
        let name = format!(
            "attention on tensor cores: {heads} over {kv_heads} heads of {d}, documents {documents:?}"
        );
        case(cases, name, move |twin| both_passes(twin, sizes));
    }
}
