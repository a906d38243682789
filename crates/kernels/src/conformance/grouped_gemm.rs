//! Products over groups of rows: sizes known to the host and sizes on the device, empty groups, one group with all rows,
//! single rows, spare room behind the groups, more groups than a warp has lanes.

use super::gemm::{base, exact, whole};
use super::twin::Twin;
use super::{Cases, case};
use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::grouped_gemm::{
    grouped_accumulate_tn, grouped_accumulate_tn_on_device, grouped_nn, grouped_nn_on_device, grouped_nt,
    grouped_nt_on_device,
};
use crate::{Tensor, bf16};

fn counts() -> Vec<Vec<usize>> {
    let many = (0..40).map(|e| usize::from(e % 3 == 1) * (e % 5)).collect();
    vec![vec![0, 0], vec![1, 1, 1], vec![0, 150, 0], vec![65, 3, 0, 64, 7], many]
}

/// (n, k): odd ones, and rows of 16 bytes.
const SIZES: [(usize, usize); 3] = [(13, 37), (72, 40), (8, 0)];

fn one<T: Float>(twin: &Twin, counts: &[usize], (n, k): (usize, usize), shift: usize) -> Result<(), String> {
    let (experts, r) = (counts.len(), counts.iter().sum::<usize>());
    let at = |what: &str| format!("{what} of {counts:?}, {n} x {k}");
    let (x, w) = (whole::<T>(twin, [r, k], 1, shift), whole::<T>(twin, [experts, n, k], 2, shift));
    let dy = whole::<T>(twin, [r, n], 3, shift);
    let (y, dx) = (grouped_nt(&x.cpu, &w.cpu, counts), grouped_nn(&dy.cpu, &w.cpu, counts));
    exact(&at("nt"), &y, &grouped_nt(&x.gpu, &w.gpu, counts))?;
    exact(&at("nn"), &dx, &grouped_nn(&dy.gpu, &w.gpu, counts))?;
    let mut grad = base::<T::Acc>(twin, [experts, n, k]);
    grouped_accumulate_tn(&mut grad.cpu, &dy.cpu, &x.cpu, counts);
    grouped_accumulate_tn(&mut grad.gpu, &dy.gpu, &x.gpu, counts);
    exact(&at("tn"), &grad.cpu, &grad.gpu)
}

/// The sizes in a tensor, and spare rows of NaN behind the groups: they must not be read into anything.
fn one_on_device<T: Float>(
    twin: &Twin,
    counts: &[usize],
    (n, k): (usize, usize),
    spare: usize,
) -> Result<(), String> {
    let (experts, r) = (counts.len(), counts.iter().sum::<usize>());
    let at = |what: &str| format!("{what} of {counts:?} on the device, {spare} spare, {n} x {k}");
    let list: Vec<i32> = counts.iter().map(|c| *c as i32).collect();
    let list = Tensor::from_slice(&twin.gpu, [experts], &list, Category::Data);
    let (x, w) = (whole::<T>(twin, [r, k], 1, 0), whole::<T>(twin, [experts, n, k], 2, 0));
    let dy = whole::<T>(twin, [r, n], 3, 0);
    let with_spare = |x: &Tensor<T>, fill: f64| {
        let mut values = x.to_vec();
        values.resize(values.len() + spare * x.row_len(), T::from_f64(fill));
        let shape = [r + spare, x.row_len()];
        let on = |device| Tensor::from_slice(device, shape, &values, Category::Data);
        (on(&twin.cpu), on(&twin.gpu))
    };
    let ((_, x_room), (_, dy_room)) = (with_spare(&x.cpu, f64::NAN), with_spare(&dy.cpu, f64::NAN));
    let (y, _) = with_spare(&grouped_nt(&x.cpu, &w.cpu, counts), 0.0);
    exact(&at("nt"), &y, &grouped_nt_on_device(&x_room, &w.gpu, &list))?;
    let (dx, _) = with_spare(&grouped_nn(&dy.cpu, &w.cpu, counts), 0.0);
    exact(&at("nn"), &dx, &grouped_nn_on_device(&dy_room, &w.gpu, &list))?;
    let mut grad = base::<T::Acc>(twin, [experts, n, k]);
    grouped_accumulate_tn(&mut grad.cpu, &dy.cpu, &x.cpu, counts);
    grouped_accumulate_tn_on_device(&mut grad.gpu, &dy_room, &x_room, &list);
    exact(&at("tn"), &grad.cpu, &grad.gpu)
}

fn of_type<T: Float>(cases: &mut Cases) {
    case(cases, format!("grouped gemm: nt, nn, tn {}", T::DTYPE), |twin| {
        for (i, counts) in counts().iter().enumerate() {
            one::<T>(twin, counts, SIZES[i % SIZES.len()], 0)?;
            one::<T>(twin, counts, SIZES[(i + 1) % SIZES.len()], 1)?;
        }
        Ok(())
    });
    case(cases, format!("grouped gemm: sizes on the device {}", T::DTYPE), |twin| {
        for (i, counts) in counts().iter().enumerate() {
            one_on_device::<T>(twin, counts, SIZES[i % SIZES.len()], [0, 70, 3][i % 3])?;
        }
        Ok(())
    });
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<f32>(cases);
    of_type::<f64>(cases);
    of_type::<bf16>(cases);
}
