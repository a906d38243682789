//! Speed of dispatch and combine (forward) against a plain copy by the same ranks and threads, in turns.
//!
//! Bytes are those that no dispatcher can avoid: every routed row read once and written once on the way to
//! its expert, and once more on the way back. Rate = bytes of all ranks / time of the slowest rank; share =
//! rate over the rate of a copy of as many rows (read once, written once), best round of each. A combine that
//! adds while it reads writes fewer rows than it is credited with, so a share can pass 1.

use std::time::{Duration, Instant};

use plica_comm::{LaunchError, LaunchOptions, Mesh, Message, Purpose, RankContext, Reduce, run_ranks};
use plica_folding::{Layout, LayoutSpec};
use plica_kernels::ops::elementwise::copy_range;
use plica_kernels::rng::{Purpose as Draws, Stream};
use plica_kernels::{Category, DType, Float, Tensor};

use crate::choose::{DispatcherKind, build};
use crate::dispatcher::Dispatcher;
use crate::error::DispatchError;
use crate::routing::Routing;

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct BenchOptions {
    /// Ranks, all of them along EP.
    pub ep: usize,
    /// CPU threads of each rank.
    pub threads_per_rank: usize,
    /// Tokens of each rank.
    pub tokens: usize,
    /// Elements of a row.
    pub width: usize,
    /// Number of experts.
    pub experts: usize,
    /// Experts of a token.
    pub k: usize,
    /// Rounds; the best one counts.
    pub rounds: usize,
    /// Seed of the routing.
    pub seed: u64,
}

impl Default for BenchOptions {
    fn default() -> Self {
        BenchOptions {
            ep: 2,
            threads_per_rank: 1,
            tokens: 4096,
            width: 1024,
            experts: 8,
            k: 2,
            rounds: 20,
            seed: 1,
        }
    }
}

/// One dispatcher's figures.
#[derive(Clone, Copy, Debug)]
pub struct BenchRow {
    /// The dispatcher.
    pub kind: DispatcherKind,
    /// Element type of the rows.
    pub dtype: DType,
    /// Rows that all ranks route.
    pub rows: usize,
    /// Nanoseconds of the dispatch in the best round.
    pub dispatch_ns: f64,
    /// Nanoseconds of the combine in the best round.
    pub combine_ns: f64,
    /// Rate of both together, in 1e9 bytes a second.
    pub gigabytes_per_second: f64,
    /// Rate of a plain copy.
    pub copy_gigabytes_per_second: f64,
}

impl BenchRow {
    /// Rate as a part of the copy's.
    pub fn share_of_copy(&self) -> f64 {
        self.gigabytes_per_second / self.copy_gigabytes_per_second
    }
}

/// Measures every dispatcher.
///
/// # Errors
/// When the options are no layout, or a rank fails.
pub fn bench<T: Float + Message>(options: &BenchOptions) -> Result<Vec<BenchRow>, LaunchError>
where
    T::Acc: Message,
{
    let launch = LaunchOptions { threads_per_rank: options.threads_per_rank, ..LaunchOptions::default() };
    let mut of_ranks = run_ranks(options.ep, launch, |context| measure::<T>(&context, options))?;
    Ok(of_ranks.swap_remove(0))
}

fn measure<T: Float + Message>(
    context: &RankContext,
    options: &BenchOptions,
) -> Result<Vec<BenchRow>, Box<dyn std::error::Error + Send + Sync>>
where
    T::Acc: Message,
{
    let spec = LayoutSpec { world: options.ep, ep: options.ep, ..LayoutSpec::default() };
    let mesh = Mesh::new(&context.world, Layout::new(&spec)?)?;
    let (x_td, routing) = input::<T>(context, options);
    let rows = options.tokens * options.k;
    let row_bytes = options.width * size_of::<T>();
    // Read once and written once, on every rank.
    let one_way_bytes = (2 * rows * row_bytes * options.ep) as f64;
    let dispatchers = DispatcherKind::ALL
        .into_iter()
        .map(|kind| build::<T>(kind, &mesh, options.experts))
        .collect::<Result<Vec<_>, _>>()?;
    let from = Tensor::<T>::zeros(&context.device, [rows, options.width], Category::Workspace);
    let mut to = Tensor::<T>::zeros(&context.device, [rows, options.width], Category::Workspace);
    let mut best_copy_ns = f64::INFINITY;
    let mut best = vec![[f64::INFINITY; 2]; dispatchers.len()];
    // One round more than asked for: the first one fetches fresh memory.
    for _ in 0..=options.rounds {
        context.world.barrier(Purpose::Control)?;
        let start = Instant::now();
        copy_range(&mut to, 0, &from, 0..rows * options.width);
        let [copy_ns, _] = slowest(context, [start.elapsed(), Duration::ZERO])?;
        best_copy_ns = best_copy_ns.min(copy_ns);
        for (dispatcher, best) in dispatchers.iter().zip(&mut best) {
            let found = slowest(context, forward(context, dispatcher.as_ref(), &x_td, &routing)?)?;
            if found.iter().sum::<f64>() < best.iter().sum() {
                *best = found;
            }
        }
    }
    let row = |(kind, [dispatch_ns, combine_ns]): (DispatcherKind, [f64; 2])| BenchRow {
        kind,
        dtype: T::DTYPE,
        rows: rows * options.ep,
        dispatch_ns,
        combine_ns,
        gigabytes_per_second: 2.0 * one_way_bytes / (dispatch_ns + combine_ns),
        copy_gigabytes_per_second: one_way_bytes / best_copy_ns,
    };
    Ok(DispatcherKind::ALL.into_iter().zip(best).map(row).collect())
}

/// Time of a dispatch and of a combine on this rank.
fn forward<T: Float>(
    context: &RankContext,
    dispatcher: &dyn Dispatcher<T>,
    x_td: &Tensor<T>,
    routing: &Routing<T::Acc>,
) -> Result<[Duration; 2], DispatchError> {
    context.world.barrier(Purpose::Control)?;
    let start = Instant::now();
    let (dispatched, handle) = dispatcher.dispatch(x_td, routing)?;
    let middle = Instant::now();
    let y_td = dispatcher.combine(&dispatched.x_rd, &handle)?;
    let times = [middle - start, middle.elapsed()];
    drop(y_td);
    Ok(times)
}

/// Nanoseconds of the slowest rank.
fn slowest(context: &RankContext, own: [Duration; 2]) -> Result<[f64; 2], DispatchError> {
    let own = own.map(|time| time.as_nanos() as f64);
    let all = context.world.all_reduce_f64(Purpose::Control, &context.device, &own, Reduce::Max)?;
    Ok([all[0], all[1]])
}

/// Token rows, and for each token k different experts with equal chances.
fn input<T: Float>(context: &RankContext, options: &BenchOptions) -> (Tensor<T>, Routing<T::Acc>) {
    let (tokens, k) = (options.tokens, options.k);
    let stream = Stream::new(options.seed, Draws::Named("dispatch bench"));
    let first = (context.rank * tokens) as u64;
    let mut ids_tk = Vec::with_capacity(tokens * k);
    for token in 0..tokens as u64 {
        let mut free: Vec<i32> = (0..options.experts as i32).collect();
        for slot in 0..k as u64 {
            let draw = stream.uniform((first + token) * k as u64 + slot);
            ids_tk.push(free.swap_remove((draw * free.len() as f64) as usize));
        }
    }
    let device = &context.device;
    let x_td = Tensor::full(device, [tokens, options.width], T::from_f64(0.5), Category::Activation);
    let weights = Tensor::full(device, [tokens, k], T::Acc::from_f64(1.0), Category::Activation);
    let ids = Tensor::from_slice(device, [tokens, k], &ids_tk, Category::Data);
    (x_td, Routing::new(options.experts, ids, weights))
}
