//! Rates of the operations at the shapes of the `moe-small` preset (d 512, 16 experts of width 512, top-2, 8 heads
//! of 64 over 4 key heads, sequences of 512, 2,048 tokens, vocabulary 4,096), on all threads. Criterion prints
//! "elem/s" where an element is a floating-point operation; the first lines give the machine's own limits.

use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use plica_kernels::ops::{activation, attention, dropout::Dropout, gemm, grouped_gemm};
use plica_kernels::rng::{Purpose, Stream};
use plica_kernels::{Category, Device, Tensor, probe};
use std::hint::black_box;
use std::time::Duration;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn random(device: &Device, shape: &[usize]) -> Tensor<f32> {
    let stream = Stream::new(1, Purpose::Named("bench"));
    let values: Vec<f32> =
        (0..shape.iter().product::<usize>() as u64).map(|i| stream.uniform(i) as f32 - 0.5).collect();
    Tensor::from_slice(device, shape, &values, Category::Data)
}

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400));
    group
}

fn machine(_: &mut Criterion) {
    let rates = probe::roofline(&Device::cpu(threads()));
    println!(
        "limits: multiply-adds {:.1} GFLOP/s on one thread, {:.1} on {}; copy {:.1} GB/s; best product {:.1} GFLOP/s",
        rates.fma_one_thread.flops_per_s / 1e9,
        rates.fma_all_threads.flops_per_s / 1e9,
        rates.threads,
        rates.copy.bytes_per_s / 1e9,
        rates.gemm.flops_per_s / 1e9,
    );
}

fn products(criterion: &mut Criterion) {
    let device = Device::cpu(threads());
    let mut group = group(criterion, "gemm");
    for (m, k, n) in [
        (2048, 512, 1024),
        (2048, 512, 512),
        (256, 512, 1024),
        (256, 512, 512),
        (2048, 512, 4096),
        (2048, 512, 16),
    ] {
        group.throughput(Throughput::Elements(2 * (m * k * n) as u64));
        let (x, w, dy) = (random(&device, &[m, k]), random(&device, &[n, k]), random(&device, &[m, n]));
        let mut grad = Tensor::<f32>::zeros(&device, [n, k], Category::Gradient);
        let name = |layout: &str| format!("{layout} {m}x{k}x{n}");
        group.bench_function(name("nt"), |b| b.iter(|| black_box(gemm::matmul_nt(&x, &w))));
        group.bench_function(name("nn"), |b| b.iter(|| black_box(gemm::matmul_nn(&dy, &w))));
        group.bench_function(name("tn"), |b| b.iter(|| gemm::accumulate_tn(&mut grad, &dy, &x)));
    }
    group.finish();
}

fn experts(criterion: &mut Criterion) {
    let device = Device::cpu(threads());
    let mut group = group(criterion, "grouped");
    let (experts, rows, d) = (16, 4096, 512);
    let even = vec![rows / experts; experts];
    let spread: Vec<usize> = (0..experts).map(|e| 121 + 18 * e).collect();
    let mut skewed = vec![0; experts];
    skewed[3] = rows;
    for (counts, name) in [(&even, "even"), (&spread, "spread"), (&skewed, "one expert")] {
        for n in [1024, 512] {
            let total: usize = counts.iter().sum();
            group.throughput(Throughput::Elements(2 * (total * d * n) as u64));
            let (x, dy) = (random(&device, &[total, d]), random(&device, &[total, n]));
            let w = random(&device, &[experts, n, d]);
            let mut grad = Tensor::<f32>::zeros(&device, [experts, n, d], Category::Gradient);
            let name = |layout: &str| format!("{layout} {name} {total}x{d}x{n}");
            group.bench_function(name("nt"), |b| {
                b.iter(|| black_box(grouped_gemm::grouped_nt(&x, &w, counts)))
            });
            group.bench_function(name("nn"), |b| {
                b.iter(|| black_box(grouped_gemm::grouped_nn(&dy, &w, counts)))
            });
            group.bench_function(name("tn"), |b| {
                b.iter(|| grouped_gemm::grouped_accumulate_tn(&mut grad, &dy, &x, counts));
            });
        }
    }
    group.finish();
}

fn attention(criterion: &mut Criterion) {
    let device = Device::cpu(threads());
    let mut group = group(criterion, "attention");
    for documents in [vec![0, 512, 1024, 1536, 2048], vec![0, 2048]] {
        let (heads, kv, d) = (8, 4, 64);
        let q = random(&device, &[2048, heads, d]);
        let (k, v) = (random(&device, &[2048, kv, d]), random(&device, &[2048, kv, d]));
        let spec = attention::AttentionSpec::causal(0.125, &documents);
        let pairs: usize = documents.windows(2).map(|w| (w[1] - w[0]) * (w[1] - w[0] + 1) / 2).sum();
        let name = |what: &str| format!("{what} {} documents", documents.len() - 1);
        // Two products of 2 d operations a visible pair forward, five backward.
        group.throughput(Throughput::Elements((4 * d * heads * pairs) as u64));
        group.bench_function(name("forward"), |b| {
            b.iter(|| black_box(attention::attention_forward(&q, &k, &v, None, &spec)));
        });
        let (out, lse) = attention::attention_forward(&q, &k, &v, None, &spec);
        group.throughput(Throughput::Elements((10 * d * heads * pairs) as u64));
        group.bench_function(name("backward"), |b| {
            b.iter(|| black_box(attention::attention_backward(&q, &q, &k, &v, None, &out, &lse, &spec)));
        });
    }
    group.finish();
}

fn materialised(criterion: &mut Criterion) {
    let device = Device::cpu(threads());
    let mut group = group(criterion, "attention that keeps its probabilities, 4 sequences of 512");
    let (heads, kv, d, s) = (8, 4, 64, 512);
    let q = random(&device, &[4 * s, heads, d]);
    let (k, v) = (random(&device, &[4 * s, kv, d]), random(&device, &[4 * s, kv, d]));
    let documents: Vec<usize> = (0..=4).map(|i| i * s).collect();
    let dropout = attention::ScoreDropout {
        dropout: Dropout::new(Stream::new(1, Purpose::Dropout(0)), 0.1),
        first_token: 0,
        first_head: 0,
        heads,
    };
    for (name, dropout) in [("no dropout", None), ("dropout", Some(dropout))] {
        let attention = attention::AttentionSpec::causal(0.125, &documents);
        let spec = attention::MaterialisedSpec { attention, sequence: s, dropout };
        // Whole products: two forward, four backward.
        group.throughput(Throughput::Elements((4 * d * heads * 4 * s * s) as u64));
        group.bench_function(format!("forward, {name}"), |b| {
            b.iter(|| black_box(attention::materialised_forward(&q, &k, &v, &spec)));
        });
        let (_, saved) = attention::materialised_forward(&q, &k, &v, &spec);
        group.throughput(Throughput::Elements((8 * d * heads * 4 * s * s) as u64));
        group.bench_function(format!("backward, {name}"), |b| {
            b.iter(|| black_box(attention::materialised_backward(&q, (&q, &k, &v), &saved, &spec)));
        });
    }
    group.finish();
}

fn dropout(criterion: &mut Criterion) {
    let device = Device::cpu(threads());
    let mut group = group(criterion, "dropout (elements)");
    let x = random(&device, &[4096, 512]);
    let dropout = Dropout::new(Stream::new(1, Purpose::Dropout(0)), 0.1);
    let mask = dropout.mask(&device, x.shape(), 0);
    group.throughput(Throughput::Elements(x.len() as u64));
    group.bench_function("mask", |b| b.iter(|| black_box(dropout.mask(&device, x.shape(), 0))));
    group.bench_function("apply", |b| b.iter(|| black_box(dropout.apply(&x, &mask))));
    group.finish();
}

fn activations(criterion: &mut Criterion) {
    let device = Device::cpu(threads());
    let mut group = group(criterion, "swiglu (bytes read and written)");
    let (rows, f) = (4096, 512);
    let (gate_up, dh) = (random(&device, &[rows, 2 * f]), random(&device, &[rows, f]));
    let weights = random(&device, &[rows]);
    group.throughput(Throughput::Bytes((rows * f * 3 * 4) as u64));
    group.bench_function("forward", |b| {
        b.iter(|| black_box(activation::swiglu_forward(&gate_up, Some(&weights))));
    });
    group.throughput(Throughput::Bytes((rows * f * 5 * 4) as u64));
    group.bench_function("backward", |b| {
        b.iter(|| black_box(activation::swiglu_backward(&dh, &gate_up, Some(&weights))));
    });
    group.finish();
}

criterion_group!(benches, machine, products, experts, attention, materialised, dropout, activations);
criterion_main!(benches);
