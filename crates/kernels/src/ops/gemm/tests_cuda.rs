//! What is decided before anything runs on a GPU: parts of grouped products, launches.

use super::cuda::{Launch, Layout, Operation, starts};
use crate::dtype::DType;

fn operation(layout: Layout, (m, n, k): (usize, usize, usize), c: DType) -> Operation {
    let (a, b) = ((0x1000, DType::Bf16), (0x2000, DType::Bf16));
    Operation { layout, a, b, c: (0x4000, c), m, n, k, accumulate: layout == Layout::Tn }
}

#[test]
fn groups_of_rows_have_their_own_matrix() {
    let nt = operation(Layout::Nt, (10, 3, 5), DType::Bf16).product(2, 4, 6);
    assert_eq!((nt.m, nt.n, nt.k), (6, 3, 5));
    assert_eq!(nt.a, (0x1000 + 2 * 4 * 5, DType::Bf16, false));
    assert_eq!(nt.b, (0x2000 + 2 * 2 * 3 * 5, DType::Bf16, true));
    assert_eq!(nt.c, (0x4000 + 2 * 4 * 3, DType::Bf16));
    let nn = operation(Layout::Nn, (10, 3, 5), DType::Bf16).product(2, 4, 6);
    assert_eq!((nn.a, nn.c), (nt.a, nt.c));
    assert_eq!(nn.b, (nt.b.0, DType::Bf16, false));
}

#[test]
fn groups_of_the_inner_dim_have_their_own_result() {
    let tn = operation(Layout::Tn, (3, 5, 10), DType::F32).product(2, 4, 6);
    assert_eq!((tn.m, tn.n, tn.k), (3, 5, 6));
    assert_eq!(tn.a, (0x1000 + 2 * 4 * 3, DType::Bf16, true));
    assert_eq!(tn.b, (0x2000 + 2 * 4 * 5, DType::Bf16, false));
    assert_eq!(tn.c, (0x4000 + 4 * 2 * 3 * 5, DType::F32));
    assert!(tn.accumulate);
}

#[test]
fn tiles_are_low_for_small_groups_and_few_tiles() {
    let height = |m, groups, multiprocessors| {
        operation(Layout::Nt, (m, 4096, 64), DType::Bf16).tile_height(groups, multiprocessors)
    };
    assert_eq!(height(8192, 1, 132), 128);
    assert_eq!(height(8192, 128, 132), 64);
    assert_eq!(height(8192, 64, 132), 128);
    // 3 x 32 tiles would leave multiprocessors idle.
    assert_eq!(height(256, 1, 132), 64);
    // The rows of a weight gradient are those of the weight, whatever the groups.
    let tn = operation(Layout::Tn, (4096, 4096, 64), DType::F32);
    assert_eq!(tn.tile_height(128, 132), 128);
    assert_eq!(height(0, 0, 1), 64);
    let f32_ = Operation { a: (0, DType::F32), ..tn };
    assert_eq!(f32_.tile_height(1, 132), 64);
}

#[test]
fn grids_hold_no_more_blocks_than_run_at_once() {
    let launch = Launch::of(&operation(Layout::Nt, (8192, 4096, 64), DType::Bf16), 8, 128, 132);
    assert_eq!(launch.kernel, "tensor_nt_bf16_128");
    assert_eq!((launch.grid, launch.threads, launch.shared_bytes), ([264, 1, 1], 128, 64 << 10));
    let launch = Launch::of(&operation(Layout::Tn, (100, 200, 64), DType::F32), 3, 64, 132);
    assert_eq!(launch.kernel, "tensor_tn_f32_64");
    assert_eq!((launch.grid, launch.shared_bytes), ([3 * 2 * 2, 1, 1], 48 << 10));
    let mut mixed = operation(Layout::Nn, (65, 64, 64), DType::Bf16);
    mixed.b.1 = DType::F32;
    let launch = Launch::of(&mixed, 1, 64, 132);
    assert_eq!(launch.kernel, "product_bf16_f32_bf16");
    assert_eq!((launch.grid, launch.threads, launch.shared_bytes), ([3, 1, 1], 256, 0));
}

#[test]
fn groups_start_where_the_ones_before_end() {
    assert_eq!(starts(&[3, 0, 130], 64), [0, 3, 3, 133, 133, 0, 1, 1, 4, 4]);
    assert_eq!(starts(&[], 64), [0, 0, 0, 0]);
}
