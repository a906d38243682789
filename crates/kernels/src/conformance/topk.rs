//! The k largest of every row: ties, masked candidates, rows of every length class, and the refusal of a NaN.

use super::twin::{Twin, same};
use super::{Cases, case};
use crate::dtype::Real;
use crate::ledger::Category;
use crate::ops::topk::topk_rows;
use crate::rng::{Purpose, Stream};
use crate::tensor::Tensor;

/// Rows, candidates, k: no rows, one candidate, each class of row length, k beyond a warp, several blocks.
const SIZES: [(usize, usize, usize); 8] =
    [(0, 8, 2), (3, 1, 1), (41, 8, 2), (20, 129, 8), (9, 512, 3), (5, 700, 4), (4, 50, 50), (2, 8, 0)];

fn scores<A: Real>(rows: usize, candidates: usize) -> Vec<A> {
    let stream = Stream::new(3, Purpose::Named("top-k"));
    // A coarse grid gives ties; some candidates are masked, and zeros have both signs.
    let score = |i: u64| match (stream.normal(i) * 3.0).round() {
        s if s < -4.0 => f64::NEG_INFINITY,
        s => s,
    };
    (0..(rows * candidates) as u64).map(|i| A::from_f64(score(i))).collect()
}

fn of_type<A: Real>(cases: &mut Cases) {
    case(cases, format!("topk: ids and values {}", A::DTYPE), |twin| {
        for (rows, candidates, k) in SIZES {
            let x = twin.values([rows, candidates], &scores::<A>(rows, candidates));
            let (cpu_ids, cpu_values) = topk_rows(&x.cpu, k).map_err(|e| e.to_string())?;
            let (ids, values) = topk_rows(&x.gpu, k).map_err(|e| e.to_string())?;
            let what = format!("{rows} rows of {candidates}, k {k}:");
            same(&format!("{what} ids"), &cpu_ids, &ids)?;
            same(&format!("{what} values"), &cpu_values, &values)?;
        }
        Ok(())
    });
    case(cases, format!("topk: NaN {}", A::DTYPE), |twin| {
        for candidates in [7, 129, 600] {
            refuses_nan::<A>(twin, candidates)?;
        }
        Ok(())
    });
}

/// The first of two rows with a NaN is named, as on the CPU.
fn refuses_nan<A: Real>(twin: &Twin, candidates: usize) -> Result<(), String> {
    let mut values = scores::<A>(30, candidates);
    for row in [11, 25] {
        values[row * candidates + candidates - 1] = A::from_f64(f64::NAN);
    }
    let told = |device| {
        let x = Tensor::from_slice(device, [30, candidates], &values, Category::Activation);
        topk_rows(&x, 2).map_or_else(|error| error.to_string(), |_| "not refused".into())
    };
    let (cpu, gpu) = (told(&twin.cpu), told(&twin.gpu));
    if cpu == gpu && cpu.contains("11") {
        return Ok(());
    }
    Err(format!("{candidates} candidates: {gpu:?}, on the CPU {cpu:?}"))
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<f32>(cases);
    of_type::<f64>(cases);
}
