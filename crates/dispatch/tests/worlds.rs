//! Every dispatcher against the oracle: all routings of four tokens over small worlds, then random worlds
//! with unequal token counts, dropped slots and padding.

mod world;

use plica_comm::{LaunchOptions, run_ranks};
use plica_dispatch::capacity::Scope;
use plica_dispatch::grid::ExpertGrid;
use plica_dispatch::oracle::Source;
use plica_dispatch::routing::{Padding, counts};
use plica_dispatch::{DispatchError, Dispatcher, Local};
use plica_kernels::bf16;
use world::{Draws, Results, World, compare, dispatchers, mesh};

const TOLERANCE: f64 = 1e-12;

/// Runs many worlds of one grid with every dispatcher in f64 and compares each with the oracle.
fn check_f64(grid: ExpertGrid, worlds: &[World]) {
    check_f64_on(LaunchOptions::default(), grid, worlds);
}

/// The same with ranks of some options.
fn check_f64_on(options: LaunchOptions, grid: ExpertGrid, worlds: &[World]) {
    run_ranks(grid.ranks(), options, |context| -> Result<(), DispatchError> {
        let mesh = mesh(&context, &grid);
        let mut all = dispatchers::<f64>(&mesh, grid.experts());
        if grid.ranks() == 1 {
            all.push(Box::new(Local::new(grid.experts())?) as Box<dyn Dispatcher<f64>>);
        }
        for (index, world) in worlds.iter().enumerate() {
            let expected = &world.expected()[context.rank];
            let mut first: Option<Results> = None;
            for dispatcher in &all {
                let found = world.run::<f64>(context.rank, &context.device, dispatcher.as_ref());
                let what = format!("{} {grid:?} world {index} rank {}", dispatcher.name(), context.rank);
                compare(&what, &found, expected, TOLERANCE);
                if dispatcher.name() != "all_gather" {
                    assert_eq!(&found, first.get_or_insert_with(|| found.clone()), "{what}: same bits");
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

/// The ids of one token, by a number below `(experts + 1)^k`: each slot an expert or empty, no expert twice.
fn token_choice(number: usize, experts: usize, k: usize) -> Option<Vec<i32>> {
    let ids: Vec<i32> =
        (0..k).map(|j| (number / (experts + 1).pow(j as u32) % (experts + 1)) as i32 - 1).collect();
    let repeated = (0..k).any(|j| ids[j] >= 0 && ids[..j].contains(&ids[j]));
    (!repeated).then_some(ids)
}

/// All routings of four tokens that lie `on` these ranks.
fn all_routings(grid: ExpertGrid, k: usize, on: [usize; 4]) -> Vec<World> {
    let choices: Vec<Vec<i32>> =
        (0..(grid.experts() + 1).pow(k as u32)).filter_map(|n| token_choice(n, grid.experts(), k)).collect();
    let mut draws = Draws::new(4);
    let width = 2;
    (0..choices.len().pow(4))
        .map(|mut number| {
            let mut sources = vec![Source::default(); grid.ranks()];
            for rank in on {
                let source = &mut sources[rank];
                source.x_td.extend(draws.values(width, false));
                source.expert_ids_tk.extend(&choices[number % choices.len()]);
                source.weights_tk.extend(draws.values(k, false));
                number /= choices.len();
            }
            World { grid, width, k, sources, integers: false }
        })
        .collect()
}

#[test]
fn every_routing_of_four_tokens_one_choice() {
    for (ep, etp, experts, on) in [
        (1, 1, 3, [0, 0, 0, 0]),
        (2, 1, 2, [0, 0, 1, 1]),
        (2, 1, 4, [0, 0, 0, 1]),
        (2, 1, 2, [1, 1, 1, 1]),
        (1, 2, 3, [0, 1, 1, 1]),
        (2, 2, 2, [0, 1, 2, 3]),
        (2, 2, 4, [0, 0, 2, 3]),
    ] {
        let grid = ExpertGrid::new(ep, etp, experts).unwrap();
        check_f64(grid, &all_routings(grid, 1, on));
    }
}

#[test]
fn every_routing_of_four_tokens_two_choices() {
    for (ep, etp, on) in [(1, 1, [0, 0, 0, 0]), (2, 1, [0, 1, 1, 1])] {
        let grid = ExpertGrid::new(ep, etp, 2).unwrap();
        check_f64(grid, &all_routings(grid, 2, on));
    }
}

fn random_world(grid: ExpertGrid, draws: &mut Draws, integers: bool) -> World {
    let (width, k) = (1 + draws.below(5), 1 + draws.below(grid.experts().min(3)));
    let crowd = draws.below(3) == 0;
    let sources = (0..grid.ranks())
        .map(|_| {
            let tokens = if draws.below(4) == 0 { 0 } else { draws.below(8) };
            let mut expert_ids_tk = Vec::new();
            for _ in 0..tokens {
                let mut free: Vec<i32> = (0..grid.experts() as i32).collect();
                for _ in 0..k {
                    let id = free.remove(if crowd { 0 } else { draws.below(free.len()) });
                    expert_ids_tk.push(if draws.below(5) == 0 { -1 } else { id });
                }
            }
            let padding = (draws.below(3) == 0).then(|| padding(&expert_ids_tk, k, grid.experts(), draws));
            Source {
                x_td: draws.values(tokens * width, integers),
                weights_tk: draws.values(tokens * k, integers),
                expert_ids_tk,
                padding,
            }
        })
        .collect();
    World { grid, width, k, sources, integers }
}

/// Padding over sequences of a random length, to at least what they hold, also beyond their tokens.
fn padding(expert_ids_tk: &[i32], k: usize, experts: usize, draws: &mut Draws) -> Padding {
    let boundaries = Scope::Sequence(1 + draws.below(6)).boundaries(expert_ids_tk.len() / k);
    let capacities: Vec<usize> = boundaries
        .windows(2)
        .map(|scope| {
            let held = counts(&expert_ids_tk[scope[0] * k..scope[1] * k], k, experts).unwrap();
            held.into_iter().max().unwrap_or(0) + draws.below(9)
        })
        .collect();
    Padding::to_capacity(&boundaries, &capacities, experts)
}

const GRIDS: [(usize, usize); 9] = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)];

/// The same worlds with the rows of every rank on an emulated GPU of its own; work runs as late as its events allow.
#[cfg(feature = "emulator")]
#[test]
fn random_worlds_on_emulated_gpus() {
    use plica_comm::DeviceMaker;
    use plica_kernels::cuda::emulator::{EmulatorOptions, Order, Timing, device};
    let late = EmulatorOptions { order: Order::Backward, timing: Timing::Late, ..EmulatorOptions::default() };
    let gpus = DeviceMaker::new("emulator", move |r| Ok(device(late, r.threads, r.budget_bytes)));
    let mut draws = Draws::new(21);
    for (ep, etp) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        let grid = ExpertGrid::new(ep, etp, 4).unwrap();
        let worlds: Vec<World> = (0..4).map(|_| random_world(grid, &mut draws, false)).collect();
        check_f64_on(LaunchOptions { device: gpus.clone(), ..LaunchOptions::default() }, grid, &worlds);
    }
}

#[test]
fn random_worlds() {
    let seed = 20;
    println!("seed {seed}");
    let mut draws = Draws::new(seed);
    for (ep, etp) in GRIDS {
        for local_experts in 1..=3 {
            let grid = ExpertGrid::new(ep, etp, ep * local_experts).unwrap();
            let worlds: Vec<World> = (0..8).map(|_| random_world(grid, &mut draws, false)).collect();
            check_f64(grid, &worlds);
        }
    }
}

/// In f32 and bf16 all-to-all and direct reads give the same bits, whatever the sums; on small integers,
/// whose sums are exact, all-gather gives them too, and all equal the oracle.
#[test]
fn same_bits_from_every_dispatcher() {
    let seed = 21;
    println!("seed {seed}");
    let mut draws = Draws::new(seed);
    for (ep, etp) in [(2, 1), (2, 2), (4, 1), (1, 4)] {
        let grid = ExpertGrid::new(ep, etp, ep * 2).unwrap();
        let worlds: Vec<World> = (0..12).map(|i| random_world(grid, &mut draws, i % 2 == 0)).collect();
        run_ranks(grid.ranks(), LaunchOptions::default(), |context| -> Result<(), DispatchError> {
            let mesh = mesh(&context, &grid);
            for world in &worlds {
                let narrow: Vec<Results> = dispatchers::<bf16>(&mesh, grid.experts())
                    .iter()
                    .map(|d| world.run::<bf16>(context.rank, &context.device, d.as_ref()))
                    .collect();
                let single: Vec<Results> = dispatchers::<f32>(&mesh, grid.experts())
                    .iter()
                    .map(|d| world.run::<f32>(context.rank, &context.device, d.as_ref()))
                    .collect();
                for (found, tolerance) in [(&narrow, 0.03), (&single, 1e-5)] {
                    assert_eq!(found[0], found[1], "all_to_all and direct, {world:?}");
                    assert_eq!(found[0].x_rd, found[2].x_rd);
                    assert_eq!(found[0].weights_r, found[2].weights_r);
                    assert_eq!(found[0].dy_rd, found[2].dy_rd);
                    let tolerance = if world.integers { 0.0 } else { tolerance };
                    compare("all_gather", &found[2], &found[0], tolerance);
                }
                if world.integers {
                    compare("exact", &single[0], &world.expected()[context.rank], 0.0);
                }
            }
            Ok(())
        })
        .unwrap();
    }
}
