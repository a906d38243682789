//! Time to build a 16,384-rank layout (TP 8, CP 16, PP 16, DP 8, EP 64) and to list its groups.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use plica_folding::{Family, Layout, LayoutSpec, nearest_valid};

fn spec() -> LayoutSpec {
    LayoutSpec { world: 16_384, tp: 8, cp: 16, pp: 16, ep: 64, etp: Some(1), ..LayoutSpec::default() }
}

fn large_world(c: &mut Criterion) {
    let layout = Layout::new(&spec()).expect("the published layout is legal");
    c.bench_function("build and list every group of every family", |b| {
        b.iter(|| {
            let layout = Layout::new(black_box(&spec())).expect("the published layout is legal");
            Family::ALL.map(|family| layout.groups(family).len())
        })
    });
    c.bench_function("coordinates of every rank", |b| {
        b.iter(|| (0..layout.world()).map(|r| layout.coordinates(black_box(r)).edp).sum::<usize>())
    });
    c.bench_function("group of every rank, families that do not span the world", |b| {
        b.iter(|| {
            let families = Family::ALL.into_iter().filter(|f| *f != Family::World);
            families
                .map(|f| (0..layout.world()).map(|r| layout.group_of(f, r).len()).sum::<usize>())
                .sum::<usize>()
        })
    });
    let wrong = LayoutSpec { tp: 24, ..spec() };
    c.bench_function("nearest valid layouts", |b| b.iter(|| nearest_valid(black_box(&wrong)).len()));
}

criterion_group!(benches, large_world);
criterion_main!(benches);
