//! The test model once more, in plain loops over f64, one token after the other, from layout-free tensors:
//! attention by its definition, no tiles, no fusion, no ranks.

use super::model::{ModelConfig, NORM_EPS, Named, THETA};
use crate::QkNorm;
use crate::tokens::{IGNORED, TokenBatch};

type Rows = Vec<Vec<f64>>;

/// y = x Wᵀ, W [out, in].
fn linear(x: &Rows, w: &[f64]) -> Rows {
    let input = x.first().map_or(1, Vec::len);
    let row = |x: &Vec<f64>| -> Vec<f64> {
        w.chunks(input).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    };
    x.iter().map(row).collect()
}

fn rms(x: &[f64], w: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(w).map(|(x, w)| w * x / (mean + NORM_EPS).sqrt()).collect()
}

fn add(a: &Rows, b: &Rows) -> Rows {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
}

/// Turns each head of a row by `position`.
fn turn(row: &mut [f64], head_dim: usize, position: usize) {
    for head in row.chunks_mut(head_dim) {
        for i in 0..head_dim / 2 {
            let angle = position as f64 * THETA.powf(-2.0 * i as f64 / head_dim as f64);
            let (a, b) = (head[i], head[i + head_dim / 2]);
            head[i] = a * angle.cos() - b * angle.sin();
            head[i + head_dim / 2] = b * angle.cos() + a * angle.sin();
        }
    }
}

fn normed_heads(rows: &mut Rows, kind: QkNorm, w: Option<&Vec<f64>>, head_dim: usize) {
    for row in rows {
        match (kind, w) {
            (QkNorm::Head, Some(w)) => {
                *row = row.chunks(head_dim).flat_map(|head| rms(head, w)).collect();
            }
            (QkNorm::Full, Some(w)) => *row = rms(row, w),
            _ => {}
        }
    }
}

fn attention(c: &ModelConfig, p: &Named, name: &str, x: &Rows, batch: &TokenBatch) -> Rows {
    let get = |part: &str| &p[&format!("{name}.{part}")];
    let (mut q, mut k, v) = (linear(x, get("q")), linear(x, get("k")), linear(x, get("v")));
    normed_heads(&mut q, c.qk_norm, p.get(&format!("{name}.q_norm")), c.head_dim);
    normed_heads(&mut k, c.qk_norm, p.get(&format!("{name}.k_norm")), c.head_dim);
    let mut out = vec![vec![0.0; c.heads * c.head_dim]; x.len()];
    for document in batch.documents.windows(2) {
        for t in document[0]..document[1] {
            turn(&mut q[t], c.head_dim, t - document[0]);
            turn(&mut k[t], c.head_dim, t - document[0]);
        }
        for t in document[0]..document[1] {
            for head in 0..c.heads {
                let kv = head / (c.heads / c.kv_heads);
                let part = |row: &[f64], h: usize| row[h * c.head_dim..(h + 1) * c.head_dim].to_vec();
                let first = document[0].max((t + 1).saturating_sub(c.window.unwrap_or(usize::MAX)));
                let scores: Vec<f64> = (first..=t)
                    .map(|s| {
                        let dot: f64 =
                            part(&q[t], head).iter().zip(part(&k[s], kv)).map(|(a, b)| a * b).sum();
                        (dot / (c.head_dim as f64).sqrt()).exp()
                    })
                    .collect();
                let total: f64 = scores.iter().sum();
                for (score, s) in scores.iter().zip(first..) {
                    for (i, value) in part(&v[s], kv).iter().enumerate() {
                        out[t][head * c.head_dim + i] += score / total * value;
                    }
                }
            }
        }
    }
    linear(&out, get("o"))
}

fn mlp(p: &Named, name: &str, x: &Rows) -> Rows {
    let get = |part: &str| &p[&format!("{name}.{part}")];
    let (gate, up) = (linear(x, get("gate")), linear(x, get("up")));
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let row = |(g, u): (&Vec<f64>, &Vec<f64>)| g.iter().zip(u).map(|(g, u)| silu(*g) * u).collect();
    linear(&gate.iter().zip(&up).map(row).collect(), get("down"))
}

/// Logits of every token.
pub fn logits(c: &ModelConfig, p: &Named, batch: &TokenBatch) -> Rows {
    let embed = |id: &i32| p["embedding"][*id as usize * c.width..(*id as usize + 1) * c.width].to_vec();
    let mut x: Rows = batch.ids.iter().map(embed).collect();
    for layer in 0..c.layers {
        let name = |part: &str| format!("layers.{layer}.{part}");
        let normed = |x: &Rows, part: &str| x.iter().map(|x| rms(x, &p[&name(part)])).collect::<Rows>();
        let h = normed(&x, "attention_norm");
        x = add(&x, &attention(c, p, &name("attention"), &h, batch));
        let h = normed(&x, "feed_forward_norm");
        x = add(&x, &mlp(p, &name("mlp"), &h));
    }
    let x: Rows = x.iter().map(|x| rms(x, &p["norm"])).collect();
    linear(&x, &p[if c.tied { "embedding" } else { "head" }])
}

/// Mean loss over the valid targets of the batches.
pub fn loss(c: &ModelConfig, p: &Named, batches: &[TokenBatch]) -> f64 {
    let (mut sum, mut valid) = (0.0, 0);
    for batch in batches {
        for (row, target) in logits(c, p, batch).iter().zip(&batch.targets) {
            if *target != IGNORED {
                let total: f64 = row.iter().map(|x| x.exp()).sum();
                sum += total.ln() - row[*target as usize];
                valid += 1;
            }
        }
    }
    sum / f64::from(valid)
}
