//! Shards against a plain enumeration: every element of every local tensor is in exactly one shard, padding is what
//! the report says, gathering puts everything back.

use plica_folding::axis::Axis;
use plica_folding::groups;
use plica_folding::layout::{Layout, LayoutSpec};
use plica_kernels::{Category, Device, Tensor};

use crate::param::{Family, Init, ParamId, ParamSpec, ParamSpecs, Params, Slicing};
use crate::place::Place;
use crate::shard::gather::tensors_of;
use crate::shard::part::{Member, Part};
use crate::shard::{Kept, ShardLayout, ShardOptions, Sharding, Zero};

fn part(sizes: &[(usize, usize)], ranks: usize, shard: usize, layout: ShardLayout) -> Part {
    let members: Vec<Member> = sizes
        .iter()
        .enumerate()
        .map(|(i, (rows, row_len))| Member {
            id: ParamId(i),
            len: rows * row_len,
            row_len: *row_len,
            same_over_tp: i == 0,
        })
        .collect();
    Part::new(Family::Dense, groups::Family::DpCp, &members, (ranks, shard), layout)
}

#[test]
fn every_element_is_in_one_shard_and_comes_back() {
    let device = Device::cpu(1);
    // Rows that do not divide, a parameter smaller than the group, an empty one.
    let sizes = [(3, 1), (5, 2), (1, 7), (0, 4), (2, 3)];
    for layout in [ShardLayout::Flat, ShardLayout::PerParameter] {
        for ranks in 1..=9 {
            let parts: Vec<Part> = (0..ranks).map(|shard| part(&sizes, ranks, shard, layout)).collect();
            let len: usize = parts[0].len();
            assert_eq!(len, 3 + 10 + 7 + 6);
            // Element i of parameter p holds 100 p + i; padding holds -1.
            let mut all = vec![-1.0; parts[0].gathered_len()];
            let mut seen = 0;
            for (start, run) in parts[0].gathered_runs() {
                for (k, element) in run.range.clone().enumerate() {
                    assert_eq!(all[start + k], -1.0, "in one shard only");
                    all[start + k] = (100 * run.index + element) as f64;
                    seen += 1;
                }
            }
            assert_eq!(seen, len, "{layout:?} over {ranks}");
            let gathered = Tensor::from_slice(&device, [all.len()], &all, Category::Workspace);
            for (p, tensor) in tensors_of(&parts[0], gathered).iter().enumerate() {
                let expected: Vec<f64> = (0..sizes[p].0 * sizes[p].1).map(|i| (100 * p + i) as f64).collect();
                assert_eq!(tensor.to_vec(), expected, "{layout:?} over {ranks}, parameter {p}");
            }
            for (shard, part) in parts.iter().enumerate() {
                assert_eq!(part.own_runs(), parts[0].runs[shard]);
                let same: usize =
                    part.own_runs().iter().filter(|r| r.index == 0).map(|r| r.range.len()).sum();
                assert_eq!(part.same_over_tp, same);
                let even = len.div_ceil(ranks);
                match layout {
                    ShardLayout::Flat => assert_eq!(part.own_len(), even),
                    // At most one row of each parameter more than an even share.
                    ShardLayout::PerParameter => {
                        assert!(part.own_len() * ranks <= len + ranks * (1 + 2 + 7 + 3))
                    }
                }
            }
        }
    }
}

fn specs() -> ParamSpecs {
    let normal = Init::Normal { std: 0.5 };
    let mut specs = ParamSpecs::new();
    let table = ParamSpec::replicated("embedding", &[10, 3], true, normal);
    specs.add(table.cut(Slicing::padded(0, Axis::Tp, 10)));
    for layer in 0..3 {
        let name = |part: &str| format!("layers.{layer}.{part}");
        specs.add(ParamSpec::replicated(name("norm"), &[5], false, normal));
        let qkv = ParamSpec::replicated(name("attention.qkv"), &[16, 5], true, normal);
        specs.add(qkv.cut(Slicing::fused(0, Axis::Tp, &[("q", 8), ("k", 4), ("v", 4)])));
        let output = ParamSpec::replicated(name("attention.o"), &[5, 8], true, normal);
        specs.add(output.cut(Slicing::even(1, Axis::Tp, 8)));
        let down = ParamSpec::replicated(name("moe.experts.down"), &[4, 6, 4], true, normal).expert();
        specs.add(down.cut(Slicing::even(0, Axis::Ep, 4)).cut(Slicing::even(2, Axis::Etp, 4)));
    }
    specs.add(ParamSpec::replicated("head", &[7], true, normal));
    specs
}

/// Layout-free tensors by name: values of all ranks that write their pieces, each element by one of them.
fn written(layout: &Layout, shard: &ShardOptions, kept: Kept) -> Vec<(String, Vec<f64>)> {
    let device = Device::cpu(1);
    let mut all: Vec<(String, Vec<f64>)> = Vec::new();
    for rank in 0..layout.world() {
        let place = Place::new(layout, rank);
        let whole = Params::<f64>::new(&specs(), &place, &device, 7).expect("legal");
        let plan = Sharding::new(specs().list(), &place, shard).expect("legal");
        for id in whole.ids().filter(|id| plan.counts(kept, *id)) {
            for (piece, complete) in plan.pieces(kept, id, whole.pieces(id)).iter().zip(whole.pieces(id)) {
                // Any tensor that keeps the window: here one that starts with the run.
                let local = whole.value(id).to_vec();
                let values = match plan.window(kept, id) {
                    None => complete.copy_out(whole.value(id)),
                    Some((range, at)) => {
                        let mut kept = vec![f64::NAN; at];
                        kept.extend_from_slice(&local[range]);
                        piece.copy_out(&Tensor::from_slice(&device, [kept.len()], &kept, Category::Workspace))
                    }
                };
                assert_eq!(values.len(), piece.len());
                let size = piece.shape.iter().product();
                let entry = match all.iter().position(|(name, _)| *name == piece.name) {
                    Some(found) => found,
                    None => {
                        all.push((piece.name.clone(), vec![f64::NAN; size]));
                        all.len() - 1
                    }
                };
                assert!(piece.select(&all[entry].1).iter().all(|old| old.is_nan()), "{} twice", piece.name);
                piece.place(&mut all[entry].1, &values);
            }
        }
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn shards_of_all_ranks_are_the_layout_free_tensors_once() {
    let one = written(&Layout::one(), &ShardOptions::default(), Kept::Weight);
    assert!(one.iter().all(|(_, values)| values.iter().all(|v| v.is_finite())));
    for spec in [
        LayoutSpec { world: 4, ..LayoutSpec::default() },
        LayoutSpec { world: 6, ..LayoutSpec::default() },
        LayoutSpec { world: 8, tp: 2, ep: 2, etp: Some(1), ..LayoutSpec::default() },
        LayoutSpec { world: 8, tp: 2, cp: 2, ep: 2, etp: Some(2), ..LayoutSpec::default() },
        LayoutSpec { world: 8, tp: 4, ep: 1, etp: Some(2), ..LayoutSpec::default() },
    ] {
        let layout = Layout::new(&spec).expect("legal");
        for zero in Zero::ALL {
            for cut in [ShardLayout::Flat, ShardLayout::PerParameter] {
                for (unit_layers, experts_apart, group) in
                    [(1, true, None), (2, false, Some(1)), (1, false, None)]
                {
                    let of = ShardOptions::of(zero);
                    let shard = ShardOptions { layout: cut, unit_layers, experts_apart, group, ..of };
                    for kept in [Kept::Weight, Kept::Gradient, Kept::State] {
                        let all = written(&layout, &shard, kept);
                        assert_eq!(
                            all, one,
                            "{layout} {zero:?} {cut:?} {kept:?} {unit_layers} {experts_apart}"
                        );
                    }
                }
            }
        }
    }
}
