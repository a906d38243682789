//! The plan on hand-written worlds and the count exchange of S15 (b), from public bug reports.

use super::*;

/// S15 (b): a published send matrix of four ranks; experts = ranks.
#[test]
fn s15b_count_exchange() {
    let sent = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]];
    let grid = ExpertGrid::new(4, 1, 4).unwrap();
    let counts = Counts::new(grid, sent.concat());
    let received: Vec<Vec<usize>> = (0..4).map(|r| counts.receive_splits(r)).collect();
    assert_eq!(received, [[2, 3, 2, 2], [2, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 1]]);
    assert_eq!((0..4).map(|r| counts.rows_sent(r)).collect::<Vec<_>>(), [6, 9, 5, 7]);
    assert_eq!((0..4).map(|r| counts.rows_received(r)).collect::<Vec<_>>(), [9, 7, 6, 5]);
    for rank in 0..4 {
        assert_eq!(counts.send_splits(rank), sent[rank]);
    }
}

/// S14 (b): rank 0 has no tokens and owns everything that the others' 4 tokens with 6 experts each want.
#[test]
fn s14b_a_rank_without_tokens_receives_everything() {
    let grid = ExpertGrid::new(4, 1, 24).unwrap();
    let ids: Vec<i32> = (0..4).flat_map(|_| 0..6).collect();
    let mut rows_se = SendOrder::new(&[], 6, 24, None).unwrap().rows_e;
    for _ in 1..4 {
        rows_se.extend(SendOrder::new(&ids, 6, 24, None).unwrap().rows_e);
    }
    let counts = Counts::new(grid, rows_se);
    assert_eq!((0..4).map(|ep| counts.rows_received(ep)).collect::<Vec<_>>(), [72, 0, 0, 0]);
}

#[test]
fn rows_by_expert_scope_token_with_padding() {
    let ids = [0, 2, -1, 1, 2, 0, 1, 2];
    let order = SendOrder::new(&ids, 2, 3, None).unwrap();
    assert_eq!((&order.slots_n[..], &order.rows_e[..]), (&[0, 5, 3, 6, 1, 4, 7][..], &[2, 2, 3][..]));
    assert_eq!(order.tokens_n(), [0, 2, 1, 3, 0, 2, 3]);
    let places: Vec<u32> = (10..17).collect();
    let sums = order.token_sums(&places);
    assert_eq!(
        (0..4).map(|t| sums.list(t).to_vec()).collect::<Vec<_>>(),
        [vec![10, 14], vec![12], vec![11, 15], vec![13, 16]]
    );
    assert_eq!(order.slot_sums(&places).list(2), [0u32; 0]);

    let padding = Padding { boundaries: vec![0, 2, 4], rows_se: vec![2, 1, 1, 1, 2, 3] };
    let order = SendOrder::new(&ids, 2, 3, Some(&padding)).unwrap();
    let e = EMPTY_ROW;
    assert_eq!(order.slots_n, [0, e, 5, 3, 6, e, 1, 4, 7, e]);
    assert_eq!(order.rows_e, [3, 3, 4]);
    let tight = Padding { boundaries: vec![0, 4], rows_se: vec![1, 2, 3] };
    let text = SendOrder::new(&ids, 2, 3, Some(&tight)).unwrap_err().to_string();
    assert_eq!(text, "scope 0, expert 0: 2 rows do not fit a padded chunk of 1 rows");
}

#[test]
fn where_rows_lie() {
    // Two EP coordinates with two experts each, two ETP ranks.
    let grid = ExpertGrid::new(2, 2, 4).unwrap();
    let rows_se = vec![1, 2, 1, 2, 1, 2, 3, 0, 0, 1, 2, 3, 2, 2, 1, 1];
    let counts = Counts::new(grid, rows_se);
    // Expert 0: sources 0..4 bring 1, 1, 0, 2 rows; expert 1: 2, 2, 1, 2.
    assert_eq!(counts.run_starts(0), [0, 1, 2, 2, 4, 6, 8, 9]);
    assert_eq!(counts.rows_l(0), [4, 7]);
    // Arrival: sources 0 and 2 (ETP 0), then 1 and 3; chunks [source][local].
    assert_eq!(counts.arrival_starts(0, None), [0, 1, 4, 5, 3, 3, 7, 9]);
    // Rank 1 sends (1, 2) rows to EP 0 and (3, 0) to EP 1.
    assert_eq!(counts.destination_rows(1), [1, 6, 7, 1, 2, 3]);
}
