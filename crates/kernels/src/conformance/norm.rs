//! Norms: RMSNorm alone, with a residual, and in the halves of a width that is cut over ranks; LayerNorm.

use super::twin::{Pair, Twin, close, same};
use super::{Cases, case};
use crate::bf16;
use crate::dtype::Float;
use crate::ops::norm::{
    LayerNormGradients, add_rms_backward, add_rms_forward, inverse_rms, layer_norm_backward,
    layer_norm_forward, rms_apply, rms_apply_backward, rms_backward, rms_backward_dots, rms_forward,
    sum_of_squares,
};

/// Rows and width: no rows; odd widths; whole packs; many narrow rows (several blocks, several partial
/// sums of the weights' gradient); wide ones, to which a block gives itself; one whose sums fill much shared memory.
const SIZES: [(usize, usize); 9] =
    [(0, 8), (1, 3), (3, 7), (37, 33), (50, 64), (600, 16), (2100, 5), (35, 1000), (3, 9000)];
const EPS: f64 = 1e-5;

/// What every backward pass is given.
struct Given<T: Float> {
    x: Pair<T>,
    dy: Pair<T>,
    more: Pair<T>,
    w: Pair<T>,
    b: Pair<T>,
    dw: Pair<T::Acc>,
    db: Pair<T::Acc>,
}

impl<T: Float> Given<T> {
    fn new(twin: &Twin, (rows, d): (usize, usize)) -> Given<T> {
        Given {
            x: twin.normal([rows, d], 1),
            dy: twin.normal([rows, d], 2),
            more: twin.normal([rows, d], 3),
            w: twin.normal([d], 4),
            b: twin.normal([d], 5),
            dw: twin.normal([d], 6),
            db: twin.normal([d], 7),
        }
    }
}

fn rms<T: Float>(twin: &Twin, size: (usize, usize)) -> Result<(), String> {
    let Given { x, dy, w, mut dw, .. } = Given::<T>::new(twin, size);
    let (y, inverse) = rms_forward(&x.cpu, &w.cpu, EPS);
    let (y_gpu, inverse_gpu) = rms_forward(&x.gpu, &w.gpu, EPS);
    close("y", &y, &y_gpu, 1.0)?;
    close("inverse", &inverse, &inverse_gpu, 1.0)?;
    let dx = rms_backward(&dy.cpu, &x.cpu, &w.cpu, &inverse, &mut dw.cpu);
    let dx_gpu = rms_backward(&dy.gpu, &x.gpu, &w.gpu, &inverse_gpu, &mut dw.gpu);
    close("dx", &dx, &dx_gpu, 2.0)?;
    close("dw", &dw.cpu, &dw.gpu, 4.0)
}

fn add_rms<T: Float>(twin: &Twin, size: (usize, usize)) -> Result<(), String> {
    let Given { x, dy, more, w, mut dw, .. } = Given::<T>::new(twin, size);
    let residual = twin.normal::<T>(x.cpu.shape(), 8);
    let (sum, y, inverse) = add_rms_forward(&x.cpu, &residual.cpu, &w.cpu, EPS);
    let (sum_gpu, y_gpu, inverse_gpu) = add_rms_forward(&x.gpu, &residual.gpu, &w.gpu, EPS);
    same("sum", &sum, &sum_gpu)?;
    close("y", &y, &y_gpu, 1.0)?;
    close("inverse", &inverse, &inverse_gpu, 1.0)?;
    let (alone, _) = rms_forward(&sum_gpu, &w.gpu, EPS);
    same("y in two operations", &alone, &y_gpu)?;
    let dx = add_rms_backward(&dy.cpu, &more.cpu, &sum, &w.cpu, &inverse, &mut dw.cpu);
    let dx_gpu = add_rms_backward(&dy.gpu, &more.gpu, &sum_gpu, &w.gpu, &inverse_gpu, &mut dw.gpu);
    close("dx", &dx, &dx_gpu, 2.0)?;
    close("dw", &dw.cpu, &dw.gpu, 4.0)
}

fn sharded<T: Float>(twin: &Twin, (rows, d): (usize, usize)) -> Result<(), String> {
    let Given { x, dy, w, mut dw, .. } = Given::<T>::new(twin, (rows, d));
    // As if another rank held as many columns, and had the same sums.
    let width = 2 * d;
    let (squares, squares_gpu) = (sum_of_squares(&x.cpu), sum_of_squares(&x.gpu));
    close("squares", &squares, &squares_gpu, 1.0)?;
    let (inverse, inverse_gpu) = (inverse_rms(&squares, width, EPS), inverse_rms(&squares_gpu, width, EPS));
    close("inverse", &inverse, &inverse_gpu, 1.0)?;
    close("y", &rms_apply(&x.cpu, &w.cpu, &inverse), &rms_apply(&x.gpu, &w.gpu, &inverse_gpu), 1.0)?;
    let dots = rms_backward_dots(&dy.cpu, &x.cpu, &w.cpu);
    let dots_gpu = rms_backward_dots(&dy.gpu, &x.gpu, &w.gpu);
    close("dots", &dots, &dots_gpu, 2.0)?;
    let dx = rms_apply_backward(&dy.cpu, &x.cpu, &w.cpu, &inverse, &dots, width, &mut dw.cpu);
    let dx_gpu = rms_apply_backward(&dy.gpu, &x.gpu, &w.gpu, &inverse_gpu, &dots_gpu, width, &mut dw.gpu);
    close("dx", &dx, &dx_gpu, 2.0)?;
    close("dw", &dw.cpu, &dw.gpu, 4.0)
}

fn layer<T: Float>(twin: &Twin, size: (usize, usize)) -> Result<(), String> {
    let Given { x, dy, w, b, mut dw, mut db, .. } = Given::<T>::new(twin, size);
    let (y, mean, inverse) = layer_norm_forward(&x.cpu, &w.cpu, &b.cpu, EPS);
    let (y_gpu, mean_gpu, inverse_gpu) = layer_norm_forward(&x.gpu, &w.gpu, &b.gpu, EPS);
    close("mean", &mean, &mean_gpu, 1.0)?;
    close("inverse", &inverse, &inverse_gpu, 1.0)?;
    close("y", &y, &y_gpu, 1.0)?;
    let gradients = LayerNormGradients { dw_d: &mut dw.cpu, db_d: &mut db.cpu };
    let dx = layer_norm_backward(&dy.cpu, &x.cpu, &w.cpu, &mean, &inverse, gradients);
    let gradients = LayerNormGradients { dw_d: &mut dw.gpu, db_d: &mut db.gpu };
    let dx_gpu = layer_norm_backward(&dy.gpu, &x.gpu, &w.gpu, &mean_gpu, &inverse_gpu, gradients);
    close("dx", &dx, &dx_gpu, 4.0)?;
    close("dw", &dw.cpu, &dw.gpu, 4.0)?;
    close("db", &db.cpu, &db.gpu, 4.0)
}

/// On one rank the halves are the whole, bit for bit.
fn whole_of_one<T: Float>(twin: &Twin, (rows, d): (usize, usize)) -> Result<(), String> {
    let Given { x, dy, w, mut dw, .. } = Given::<T>::new(twin, (rows, d));
    let (y, inverse) = rms_forward(&x.gpu, &w.gpu, EPS);
    let halves = inverse_rms(&sum_of_squares(&x.gpu), d, EPS);
    same("inverse in halves", &inverse, &halves)?;
    same("y in halves", &y, &rms_apply(&x.gpu, &w.gpu, &halves))?;
    let dots = rms_backward_dots(&dy.gpu, &x.gpu, &w.gpu);
    let mut again = twin.normal::<T::Acc>([d], 6).gpu;
    let dx = rms_backward(&dy.gpu, &x.gpu, &w.gpu, &inverse, &mut dw.gpu);
    let in_halves = rms_apply_backward(&dy.gpu, &x.gpu, &w.gpu, &halves, &dots, d, &mut again);
    same("dx in halves", &dx, &in_halves)?;
    same("dw in halves", &dw.gpu, &again)
}

/// Rows that start at addresses which are no multiples of 16, and a norm per head.
fn views<T: Float>(twin: &Twin) -> Result<(), String> {
    let (x, w) = (twin.normal::<T>([40, 33], 1), twin.normal::<T>([33], 2));
    let (cpu, gpu) = (x.cpu.slice_rows(3..39), x.gpu.slice_rows(3..39));
    close("y", &rms_forward(&cpu, &w.cpu, EPS).0, &rms_forward(&gpu, &w.gpu, EPS).0, 1.0)?;
    close("squares", &sum_of_squares(&cpu), &sum_of_squares(&gpu), 1.0)?;
    let (x, w) = (twin.normal::<T>([41, 3, 16], 3), twin.normal::<T>([16], 4));
    let (y, inverse) = rms_forward(&x.cpu, &w.cpu, EPS);
    let (y_gpu, inverse_gpu) = rms_forward(&x.gpu, &w.gpu, EPS);
    close("y of heads", &y, &y_gpu, 1.0)?;
    close("inverse of heads", &inverse, &inverse_gpu, 1.0)?;
    // The same values at another address: the same bits.
    let flat = twin.normal::<T>([17 * 24 + 1], 5);
    let values = flat.gpu.slice_rows(1..17 * 24 + 1).reshape([17, 24]);
    let moved = twin.values([17, 24], &values.to_vec());
    let w = twin.normal::<T>([24], 6);
    same("y at any address", &rms_forward(&values, &w.gpu, EPS).0, &rms_forward(&moved.gpu, &w.gpu, EPS).0)
}

fn of_type<T: Float>(cases: &mut Cases) {
    type Check = fn(&Twin, (usize, usize)) -> Result<(), String>;
    let checks: [(&str, Check); 5] = [
        ("rms", rms::<T>),
        ("rms with residual", add_rms::<T>),
        ("sharded", sharded::<T>),
        ("whole of one", whole_of_one::<T>),
        ("layer", layer::<T>),
    ];
    for (name, check) in checks {
        case(cases, format!("norm: {name} {}", T::DTYPE), move |twin| {
            SIZES.iter().try_for_each(|&size| check(twin, size).map_err(|e| format!("{size:?}: {e}")))
        });
    }
    case(cases, format!("norm: views {}", T::DTYPE), views::<T>);
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<f32>(cases);
    of_type::<f64>(cases);
    of_type::<bf16>(cases);
}
