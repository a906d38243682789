//! Tools of the tests: finite differences of a scalar function in f64, and comparison with a stated tolerance.
//! Public because every crate's tests hold their backward passes against it.

/// Central difference quotient of `f` at `x` in every coordinate, with step `step`.
pub fn numeric_gradient(x: &[f64], step: f64, mut f: impl FnMut(&[f64]) -> f64) -> Vec<f64> {
    let mut moved = x.to_vec();
    (0..x.len())
        .map(|i| {
            moved[i] = x[i] + step;
            let up = f(&moved);
            moved[i] = x[i] - step;
            let down = f(&moved);
            moved[i] = x[i];
            (up - down) / (2.0 * step)
        })
        .collect()
}

/// Largest |a - b| over the elements, and where.
///
/// # Panics
/// When the lengths differ or a value is NaN on one side only.
pub fn max_difference(a: &[f64], b: &[f64]) -> (f64, usize) {
    assert_eq!(a.len(), b.len(), "compared lengths");
    let mut worst = (0.0, 0);
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        let difference = if x.is_nan() || y.is_nan() { f64::INFINITY } else { (x - y).abs() };
        if difference > worst.0 {
            worst = (difference, i);
        }
    }
    worst
}

/// Asserts |a - b| <= tolerance * max(1, max|b|) for every element.
///
/// # Panics
/// When it does not hold; the message names `what`, the index and both values.
pub fn assert_close(what: &str, a: &[f64], b: &[f64], tolerance: f64) {
    let scale = b.iter().fold(1.0f64, |m, x| m.max(x.abs()));
    let (difference, i) = max_difference(a, b);
    assert!(
        difference <= tolerance * scale,
        "{what}: element {i} is {} and should be {} (difference {difference:.3e}, allowed {:.3e})",
        a[i],
        b[i],
        tolerance * scale
    );
}
