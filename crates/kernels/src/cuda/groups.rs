//! How rows are cut over the threads of blocks: a group of threads a row, as `platform.cuh` has them. All of it follows
//! from the width of a row and its type, never from the number of rows or the card, so that a row's sum has the same
//! bits in every layout.

/// Threads of a block that holds several groups.
const THREADS: u32 = 256;
/// Threads of the largest group.
const LANES_MAX: usize = 512;
/// Packs of 16 bytes that a thread takes of a row, as long as the group can grow.
const PACKS: usize = 2;
/// Rows that a group takes one after the other where a block leaves a partial sum of its rows.
const ROWS: usize = 16;

/// Groups of threads for rows of one width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowGroups {
    /// Threads of a group: a power of two.
    pub lanes: i32,
    /// Threads of a block.
    pub threads: u32,
    /// Groups of a block: rows that it takes at a time.
    pub count: usize,
}

impl RowGroups {
    /// For rows of `width` elements of `T`.
    pub fn of<T>(width: usize) -> RowGroups {
        let packs = width.div_ceil(16 / size_of::<T>());
        let lanes = packs.div_ceil(PACKS).next_power_of_two().min(LANES_MAX);
        let threads = if lanes <= 32 { THREADS } else { lanes as u32 };
        RowGroups { lanes: lanes as i32, threads, count: threads as usize / lanes }
    }

    /// Rows whose sum is one partial sum.
    pub fn partial_rows(&self) -> usize {
        ROWS * self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_has_a_lane_and_partial_sums_a_bounded_size() {
        for width in 0..40_000 {
            let groups = RowGroups::of::<half::bf16>(width);
            assert!(groups.lanes as u32 * groups.count as u32 == groups.threads, "{width} {groups:?}");
            assert!(groups.lanes > 32 || groups.lanes as u32 * groups.count as u32 == THREADS);
            let packs = width.div_ceil(8);
            assert!(groups.count * packs <= 512.max(packs), "{width}: {packs} packs in {groups:?}");
        }
        assert_eq!(RowGroups::of::<f32>(128), RowGroups { lanes: 16, threads: 256, count: 16 });
        assert_eq!(RowGroups::of::<half::bf16>(4096), RowGroups { lanes: 256, threads: 256, count: 1 });
    }
}
