//! Covering arrays: few rows over several factors in which every pair of values of two factors that can stand
//! together does so at least once. Greedy and deterministic: a row starts from the first pair that is still
//! missing and takes for every other factor the legal value that meets most missing pairs. Source: Cohen, Dalal,
//! Fredman and Patton, "The AETG system", 1997 (here without random tries). Leaves out larger groups than pairs,
//! and any claim to be the smallest array.

use std::collections::BTreeSet;

/// A value of a factor: (factor, index of the value).
pub type Value = (usize, usize);

/// Which rows may be. A row has an index of a value for every factor.
pub trait Space {
    /// Number of values of each factor.
    fn sizes(&self) -> Vec<usize>;

    /// Whether a partial row (`None`: not chosen yet) can be completed to a legal one.
    fn can_be(&self, row: &[Option<usize>]) -> bool;
}

/// The rows, in the order in which they were made.
pub fn covering(space: &dyn Space) -> Vec<Vec<usize>> {
    let sizes = space.sizes();
    let mut missing = pairs(space, &sizes);
    let mut rows = Vec::new();
    while let Some(&(a, b)) = missing.iter().next() {
        let row = complete(space, &sizes, &missing, a, b);
        for pair in pairs_of(&row) {
            missing.remove(&pair);
        }
        rows.push(row);
    }
    rows
}

/// Every pair that a legal row can hold, lower factor first.
fn pairs(space: &dyn Space, sizes: &[usize]) -> BTreeSet<(Value, Value)> {
    let mut all = BTreeSet::new();
    let mut row = vec![None; sizes.len()];
    for f in 0..sizes.len() {
        for x in 0..sizes[f] {
            row[f] = Some(x);
            for g in f + 1..sizes.len() {
                for y in 0..sizes[g] {
                    row[g] = Some(y);
                    if space.can_be(&row) {
                        all.insert(((f, x), (g, y)));
                    }
                }
                row[g] = None;
            }
        }
        row[f] = None;
    }
    all
}

/// The pairs that a row holds.
fn pairs_of(row: &[usize]) -> impl Iterator<Item = (Value, Value)> + '_ {
    (0..row.len()).flat_map(move |f| (f + 1..row.len()).map(move |g| ((f, row[f]), (g, row[g]))))
}

/// A legal row with the two values, that meets many missing pairs.
fn complete(
    space: &dyn Space,
    sizes: &[usize],
    missing: &BTreeSet<(Value, Value)>,
    a: Value,
    b: Value,
) -> Vec<usize> {
    let mut row = vec![None; sizes.len()];
    (row[a.0], row[b.0]) = (Some(a.1), Some(b.1));
    for factor in 0..sizes.len() {
        if row[factor].is_some() {
            continue;
        }
        let mut best: Option<(usize, usize)> = None;
        for value in 0..sizes[factor] {
            row[factor] = Some(value);
            let met = met(&row, (factor, value), missing);
            if best.is_none_or(|(most, _)| met > most) && space.can_be(&row) {
                best = Some((met, value));
            }
        }
        let (_, value) = best.expect("a partial row that can be completed has a value for every factor");
        row[factor] = Some(value);
    }
    row.into_iter().flatten().collect()
}

/// Missing pairs of a value with those chosen so far.
fn met(row: &[Option<usize>], value: Value, missing: &BTreeSet<(Value, Value)>) -> usize {
    let others = row.iter().enumerate().filter(|(factor, _)| *factor != value.0);
    others
        .filter_map(|(factor, other)| other.map(|other| (factor, other)))
        .filter(|other| missing.contains(&(value.min(*other), value.max(*other))))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Factors of given sizes; of two forbidden values only one may stand in a row.
    struct Small {
        sizes: Vec<usize>,
        forbidden: Vec<(Value, Value)>,
    }

    impl Small {
        fn legal(&self, row: &[usize]) -> bool {
            !self.forbidden.iter().any(|(a, b)| row[a.0] == a.1 && row[b.0] == b.1)
        }

        fn rows(&self) -> Vec<Vec<usize>> {
            let mut rows = vec![vec![]];
            for size in &self.sizes {
                rows = rows
                    .iter()
                    .flat_map(|row| {
                        (0..*size).map(move |value| row.iter().copied().chain([value]).collect::<Vec<_>>())
                    })
                    .collect();
            }
            rows.into_iter().filter(|row| self.legal(row)).collect()
        }
    }

    impl Space for Small {
        fn sizes(&self) -> Vec<usize> {
            self.sizes.clone()
        }

        fn can_be(&self, row: &[Option<usize>]) -> bool {
            self.rows().iter().any(|legal| {
                legal.iter().zip(row).all(|(value, chosen)| chosen.is_none_or(|chosen| chosen == *value))
            })
        }
    }

    fn check(sizes: &[usize], forbidden: &[(Value, Value)], most: usize) {
        let space = Small { sizes: sizes.to_vec(), forbidden: forbidden.to_vec() };
        let rows = covering(&space);
        assert!(rows.iter().all(|row| space.legal(row)), "every row is legal: {rows:?}");
        let wanted: BTreeSet<_> =
            space.rows().iter().flat_map(|row| pairs_of(row).collect::<Vec<_>>()).collect();
        let covered: BTreeSet<_> = rows.iter().flat_map(|row| pairs_of(row).collect::<Vec<_>>()).collect();
        assert_eq!(covered, wanted, "every pair of a legal row, and no other");
        assert!(
            rows.len() <= most,
            "{} rows for {sizes:?}, of {} legal ones",
            rows.len(),
            space.rows().len()
        );
        assert_eq!(rows, covering(&space), "the same rows each time");
    }

    #[test]
    fn every_legal_pair_in_few_rows() {
        check(&[2, 2, 2], &[], 5);
        check(&[3, 3, 3, 3], &[], 12);
        check(&[6, 5, 4, 3, 2], &[], 36);
        check(&[1, 4, 1], &[], 4);
        check(&[3], &[], 0);
        check(&[3, 3, 3], &[((0, 0), (1, 1)), ((0, 2), (2, 0)), ((1, 2), (2, 2))], 12);
        // Value 0 of the last factor goes with nothing but value 0 of the first.
        check(&[3, 4, 3], &[((0, 1), (2, 0)), ((0, 2), (2, 0))], 16);
    }
}
