//! A small world of ranks with tokens, routings and linear experts; the values that the oracle expects of it;
//! and a rank that runs every step of a dispatcher and compares. Expert e on ETP rank p computes `w * M(e, p)
//! x` with its own matrix, so that a row at a wrong expert, a partial result added twice or a wrong weight
//! shows.

use plica_comm::{Mesh, RankContext};
use plica_dispatch::dispatcher::Dispatcher;
use plica_dispatch::grid::ExpertGrid;
use plica_dispatch::oracle::{Oracle, Received, Source};
use plica_dispatch::{AllGather, AllToAll, Direct, Dispatched, ExpertGroups, Routing};
use plica_folding::{Layout, LayoutSpec};
use plica_kernels::check::assert_close;
use plica_kernels::rng::{Purpose, Stream};
use plica_kernels::{Category, Device, Float, Tensor};

/// One world.
#[derive(Clone, Debug)]
pub struct World {
    pub grid: ExpertGrid,
    pub width: usize,
    pub k: usize,
    pub sources: Vec<Source>,
    /// Values are -1, 0 or 1, so that every sum is exact in any order and type.
    pub integers: bool,
}

/// Results of all steps, per rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Results {
    pub x_rd: Vec<f64>,
    pub weights_r: Vec<f64>,
    pub counts_l: Vec<usize>,
    pub y_td: Vec<f64>,
    pub dy_rd: Vec<f64>,
    pub dx_td: Vec<f64>,
    pub dweights_tk: Vec<f64>,
}

/// Entry of an expert's matrix.
fn entry(world: &World, expert: usize, etp: usize, i: usize, j: usize) -> f64 {
    let index = ((expert * 8 + etp) * 64 + i) * 64 + j;
    let draw = Stream::new(11, Purpose::Named("matrix")).uniform(index as u64) * 2.0 - 1.0;
    if world.integers { (draw * 1.49).round() } else { draw }
}

/// Upstream gradient of a rank's output, [t, d].
pub fn upstream(world: &World, rank: usize) -> Vec<f64> {
    let stream = Stream::new(12, Purpose::Named("upstream"));
    let len = world.sources[rank].x_td.len();
    let draws = (0..len).map(|i| stream.uniform((rank * 4096 + i) as u64) * 2.0 - 1.0);
    draws.map(|v| if world.integers { (v * 1.49).round() } else { v }).collect()
}

impl World {
    /// Expert of each row that a rank computes on.
    fn experts_of_rows(&self, rank: usize, counts_l: &[usize]) -> Vec<usize> {
        let experts = self.grid.experts_of(self.grid.ep_of(rank));
        experts.zip(counts_l).flat_map(|(e, &rows)| std::iter::repeat_n(e, rows)).collect()
    }

    /// Partial output rows of a rank.
    pub fn expert_forward(&self, rank: usize, counts_l: &[usize], x: &[f64], weights: &[f64]) -> Vec<f64> {
        let (d, etp) = (self.width, self.grid.etp_of(rank));
        let mut y = Vec::with_capacity(x.len());
        for (row, expert) in self.experts_of_rows(rank, counts_l).into_iter().enumerate() {
            for i in 0..d {
                let sum: f64 = (0..d).map(|j| entry(self, expert, etp, i, j) * x[row * d + j]).sum();
                y.push(weights[row] * sum);
            }
        }
        y
    }

    /// Partial gradients of a rank's input rows and weights.
    pub fn expert_backward(
        &self,
        rank: usize,
        counts_l: &[usize],
        x: &[f64],
        weights: &[f64],
        dy: &[f64],
    ) -> (Vec<f64>, Vec<f64>) {
        let (d, etp) = (self.width, self.grid.etp_of(rank));
        let (mut dx, mut dweights) = (vec![0.0; x.len()], vec![0.0; weights.len()]);
        for (row, expert) in self.experts_of_rows(rank, counts_l).into_iter().enumerate() {
            for i in 0..d {
                for j in 0..d {
                    let m = entry(self, expert, etp, i, j);
                    dx[row * d + j] += weights[row] * m * dy[row * d + i];
                    dweights[row] += m * x[row * d + j] * dy[row * d + i];
                }
            }
        }
        (dx, dweights)
    }

    /// What every rank must find.
    pub fn expected(&self) -> Vec<Results> {
        let oracle = Oracle::new(self.grid, self.width, self.k, self.sources.clone());
        let received: Vec<Received> = oracle.dispatch();
        let ranks = 0..self.grid.ranks();
        let y_rd: Vec<Vec<f64>> = ranks
            .clone()
            .map(|r| self.expert_forward(r, &received[r].counts_l, &received[r].x_rd, &received[r].weights_r))
            .collect();
        let y_td = oracle.combine(&received, &y_rd);
        let dy_td: Vec<Vec<f64>> = ranks.clone().map(|r| upstream(self, r)).collect();
        let dy_rd = oracle.combine_backward(&received, &dy_td);
        let (dx_rd, dweights_r): (Vec<_>, Vec<_>) = ranks
            .clone()
            .map(|r| {
                let r_ = &received[r];
                self.expert_backward(r, &r_.counts_l, &r_.x_rd, &r_.weights_r, &dy_rd[r])
            })
            .unzip();
        let dx_td = oracle.combine(&received, &dx_rd);
        let dweights_tk = oracle.weights_backward(&received, &dweights_r);
        let parts = ranks.zip(received).zip(y_td).zip(dy_rd).zip(dx_td).zip(dweights_tk);
        parts
            .map(|(((((_, r), y_td), dy_rd), dx_td), dweights_tk)| Results {
                x_rd: r.x_rd,
                weights_r: r.weights_r,
                counts_l: r.counts_l,
                y_td,
                dy_rd,
                dx_td,
                dweights_tk,
            })
            .collect()
    }

    /// A rank's routing on a device.
    pub fn routing<T: Float>(&self, rank: usize, device: &Device) -> Routing<T::Acc> {
        let source = &self.sources[rank];
        let shape = [source.weights_tk.len() / self.k, self.k];
        let weights: Vec<T::Acc> = source.weights_tk.iter().map(|&w| T::Acc::from_f64(w)).collect();
        let ids = Tensor::from_slice(device, shape, &source.expert_ids_tk, Category::Data);
        let weights = Tensor::from_slice(device, shape, &weights, Category::Activation);
        let routing = Routing::new(self.grid.experts(), ids, weights);
        match &source.padding {
            Some(padding) => routing.with_padding(padding.clone()),
            None => routing,
        }
    }

    /// Rows of `width` as a tensor.
    pub fn rows<T: Float>(&self, device: &Device, values: &[f64]) -> Tensor<T> {
        let typed: Vec<T> = values.iter().map(|&v| T::from_f64(v)).collect();
        Tensor::from_slice(device, [values.len() / self.width, self.width], &typed, Category::Activation)
    }

    /// The experts' partial output of what was dispatched.
    pub fn compute<T: Float>(&self, rank: usize, dispatched: &Dispatched<T>) -> Tensor<T> {
        let (x, w) = (wide(&dispatched.x_rd), wide(&dispatched.weights_r));
        self.rows(dispatched.x_rd.device(), &self.expert_forward(rank, &dispatched.counts_l, &x, &w))
    }

    /// The experts' partial gradients.
    pub fn compute_backward<T: Float>(
        &self,
        rank: usize,
        dispatched: &Dispatched<T>,
        dy_rd: &Tensor<T>,
    ) -> (Tensor<T>, Tensor<T::Acc>) {
        let (x, w) = (wide(&dispatched.x_rd), wide(&dispatched.weights_r));
        let (dx, dw) = self.expert_backward(rank, &dispatched.counts_l, &x, &w, &wide(dy_rd));
        let dw: Vec<T::Acc> = dw.iter().map(|&v| T::Acc::from_f64(v)).collect();
        let device = dispatched.x_rd.device();
        (self.rows(device, &dx), Tensor::from_slice(device, [dw.len()], &dw, Category::Activation))
    }

    /// All steps of a dispatcher on one rank.
    pub fn run<T: Float>(&self, rank: usize, device: &Device, dispatcher: &dyn Dispatcher<T>) -> Results {
        let x_td = self.rows::<T>(device, &self.sources[rank].x_td);
        let routing = self.routing::<T>(rank, device);
        let (dispatched, handle) = dispatcher.dispatch(&x_td, &routing).unwrap();
        let y_td = dispatcher.combine(&self.compute(rank, &dispatched), &handle).unwrap();
        let dy_td = self.rows::<T>(device, &upstream(self, rank));
        let dy_rd = dispatcher.combine_backward(&dy_td, &handle).unwrap();
        let (dx_rd, dweights_r) = self.compute_backward(rank, &dispatched, &dy_rd);
        let (dx_td, dweights_tk) = dispatcher.dispatch_backward(&dx_rd, &dweights_r, &handle).unwrap();
        Results {
            x_rd: wide(&dispatched.x_rd),
            weights_r: wide(&dispatched.weights_r),
            counts_l: dispatched.counts_l,
            y_td: wide(&y_td),
            dy_rd: wide(&dy_rd),
            dx_td: wide(&dx_td),
            dweights_tk: wide(&dweights_tk),
        }
    }
}

/// Values of a tensor in f64.
pub fn wide<T: Float>(x: &Tensor<T>) -> Vec<f64> {
    x.to_vec().into_iter().map(Float::to_f64).collect()
}

/// Holds every result against the expected one.
pub fn compare(what: &str, found: &Results, expected: &Results, tolerance: f64) {
    assert_eq!(found.counts_l, expected.counts_l, "{what}: rows of the local experts");
    for (name, found, expected) in [
        ("x_rd", &found.x_rd, &expected.x_rd),
        ("weights_r", &found.weights_r, &expected.weights_r),
        ("y_td", &found.y_td, &expected.y_td),
        ("dy_rd", &found.dy_rd, &expected.dy_rd),
        ("dx_td", &found.dx_td, &expected.dx_td),
        ("dweights_tk", &found.dweights_tk, &expected.dweights_tk),
    ] {
        assert_close(&format!("{what}: {name}"), found, expected, tolerance);
    }
}

/// The mesh of `ep` x `etp` ranks.
pub fn mesh(context: &RankContext, grid: &ExpertGrid) -> Mesh {
    let spec =
        LayoutSpec { world: grid.ranks(), ep: grid.ep(), etp: Some(grid.etp()), ..LayoutSpec::default() };
    Mesh::new(&context.world, Layout::new(&spec).unwrap()).unwrap()
}

/// Every dispatcher for a group, also where it has one rank.
pub fn dispatchers<T: Float + plica_comm::Message>(mesh: &Mesh, experts: usize) -> Vec<Box<dyn Dispatcher<T>>>
where
    T::Acc: plica_comm::Message,
{
    let groups = ExpertGroups::new(mesh, experts).unwrap();
    vec![
        Box::new(AllToAll::new(groups.clone())),
        Box::new(Direct::new(groups.clone()).unwrap()),
        Box::new(AllGather::new(groups)),
    ]
}

/// Draws for random worlds.
pub struct Draws {
    stream: Stream,
    next: u64,
}

impl Draws {
    /// Draws of one seed.
    pub fn new(seed: u64) -> Draws {
        Draws { stream: Stream::new(seed, Purpose::Named("worlds")), next: 0 }
    }

    /// A number in 0..n.
    pub fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        self.next += 1;
        self.stream.uniform(self.next)
    }

    /// Values of a world: reals in [-1, 1), or small integers.
    pub fn values(&mut self, len: usize, integers: bool) -> Vec<f64> {
        (0..len)
            .map(|_| if integers { self.below(3) as f64 - 1.0 } else { self.unit() * 2.0 - 1.0 })
            .collect()
    }
}
