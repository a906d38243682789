//! Matrix products at the shapes of moe-small, forward and both backwards, and grouped products over experts,
//! against the measured peak of the FMA units over the same threads.

use clap::Args;
use plica_kernels::ops::{gemm, grouped_gemm};
use plica_kernels::rng::{Purpose, Stream};
use plica_kernels::{Category, Device, Tensor, probe};

use super::{Figure, rate, timed};

/// Arguments of `plica bench gemm`.
#[derive(Debug, Args)]
pub struct GemmBench {
    /// Threads; without it all cores.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Repetitions.
    #[arg(long, default_value_t = 9, value_name = "N")]
    repetitions: usize,
}

/// (what, rows m, inner k, columns n).
const SHAPES: [(&str, usize, usize, usize); 6] = [
    ("qkv and gate|up", 2048, 512, 1024),
    ("attention output", 2048, 512, 512),
    ("one expert gate|up", 256, 512, 1024),
    ("one expert down", 256, 512, 512),
    ("output head", 2048, 512, 4096),
    ("square", 1024, 1024, 1024),
];

fn random(device: &Device, shape: &[usize], name: &str) -> Tensor<f32> {
    let draw = Stream::new(1, Purpose::Named(name));
    let values: Vec<f32> =
        (0..shape.iter().product::<usize>() as u64).map(|i| draw.uniform(i) as f32 - 0.5).collect();
    Tensor::from_slice(device, shape, &values, Category::Activation)
}

impl GemmBench {
    /// Measures.
    ///
    /// # Errors
    /// When there are no threads.
    pub fn run(&self, cores: usize) -> anyhow::Result<Vec<Figure>> {
        let threads = self.threads.unwrap_or(cores);
        anyhow::ensure!((1..=1024).contains(&threads), "--threads {threads}: from 1 to 1024");
        let device = Device::cpu(threads);
        let roofline = probe::roofline(&device);
        let peak = roofline.fma_all_threads.flops_per_s / 1e9;
        let mut figures = Vec::new();
        let mut add = |what: &str, setting: String, flop: f64, seconds: Vec<f64>| {
            let (value, range) = rate(flop / 1e9, &seconds);
            figures.push(Figure {
                what: what.to_string(),
                setting,
                value,
                range,
                unit: "GFLOP/s",
                roofline: Some((peak, "FMA peak")),
                peak_rss_mib: None,
            });
        };
        for (what, m, k, n) in SHAPES {
            let (x, w, dy) = (
                random(&device, &[m, k], "x"),
                random(&device, &[n, k], "w"),
                random(&device, &[m, n], "dy"),
            );
            let mut grad = Tensor::<f32>::zeros(&device, [n, k], Category::Gradient);
            let flop = 2.0 * (m * k * n) as f64;
            let shape = format!("{m}x{k}x{n}, {threads} thread(s)");
            let reps = self.repetitions;
            add(what, format!("forward {shape}"), flop, timed(2, reps, || drop(gemm::matmul_nt(&x, &w))));
            add(
                what,
                format!("input gradient {shape}"),
                flop,
                timed(2, reps, || drop(gemm::matmul_nn(&dy, &w))),
            );
            let weight = timed(2, reps, || gemm::accumulate_tn(&mut grad, &dy, &x));
            add(what, format!("weight gradient {shape}"), flop, weight);
        }
        for (what, skewed) in [("experts, balanced", false), ("experts, one has 30 %", true)] {
            let counts: Vec<usize> = if skewed {
                (0..16).map(|e| if e == 0 { 1216 } else { 192 }).collect()
            } else {
                vec![256; 16]
            };
            let rows: usize = counts.iter().sum();
            let (x, w) = (random(&device, &[rows, 512], "x"), random(&device, &[16, 1024, 512], "w"));
            let flop = 2.0 * (rows * 512 * 1024) as f64;
            let seconds = timed(2, self.repetitions, || drop(grouped_gemm::grouped_nt(&x, &w, &counts)));
            add(what, format!("{rows}x512x1024 over 16, {threads} thread(s)"), flop, seconds);
        }
        Ok(figures)
    }
}
