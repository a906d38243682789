//! Rows for intervals that overlap: each goes to the first row that is free, so that those of one row are disjoint.

/// The row of each interval `(start, end)`, by position; the intervals in any order.
pub fn lanes(intervals: &[(u64, u64)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..intervals.len()).collect();
    order.sort_by_key(|&i| intervals[i]);
    let (mut lanes, mut free_from) = (vec![0; intervals.len()], Vec::<u64>::new());
    for i in order {
        let (start, end) = intervals[i];
        let lane = free_from.iter().position(|free| *free <= start).unwrap_or(free_from.len());
        if lane == free_from.len() {
            free_from.push(0);
        }
        // An interval without length still takes its moment, so that two of them do not lie in each other.
        free_from[lane] = end.max(start + 1);
        lanes[i] = lane;
    }
    lanes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_is_on_different_rows_and_rows_are_used_again() {
        assert_eq!(lanes(&[(0, 10), (2, 4), (3, 5), (4, 6), (10, 11)]), [0, 1, 2, 1, 0]);
        assert_eq!(lanes(&[(5, 5), (5, 5), (6, 6)]), [0, 1, 0]);
        assert!(lanes(&[]).is_empty());
    }
}
