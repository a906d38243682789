//! Gated units, with the weight of a row and without, plain and clamped; SiLU and GELU.

use super::twin::{Pair, Twin, close};
use super::{Cases, case};
use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::activation::{
    Gelu, clamped_swiglu_backward, clamped_swiglu_forward, gelu_backward, gelu_forward, silu_backward,
    silu_forward, swiglu_backward, swiglu_forward,
};
use crate::{Tensor, bf16};

/// Rows and half columns: no rows; one; odd; whole packs; many narrow rows; a row that takes a block.
const SIZES: [(usize, usize); 7] = [(0, 8), (1, 1), (5, 7), (33, 48), (900, 3), (40, 65), (7, 1000)];
/// Near enough that several percent of normal values are clamped.
const LIMIT: f64 = 1.5;
const ALPHA: f64 = 1.702;

fn unit<T: Float>(clamped: bool, gate_up: &Tensor<T>, weights: Option<&Tensor<T::Acc>>) -> Tensor<T> {
    if clamped {
        clamped_swiglu_forward(gate_up, weights, LIMIT, ALPHA)
    } else {
        swiglu_forward(gate_up, weights)
    }
}

fn unit_backward<T: Float>(
    clamped: bool,
    dh: &Tensor<T>,
    gate_up: &Tensor<T>,
    weights: Option<&Tensor<T::Acc>>,
) -> (Tensor<T>, Option<Tensor<T::Acc>>) {
    if clamped {
        clamped_swiglu_backward(dh, gate_up, weights, LIMIT, ALPHA)
    } else {
        swiglu_backward(dh, gate_up, weights)
    }
}

fn compare<T: Float>(
    clamped: bool,
    gate_up: &Pair<T>,
    dh: &Pair<T>,
    weights: Option<&Pair<T::Acc>>,
) -> Result<(), String> {
    let (on_cpu, on_gpu) = (weights.map(|w| &w.cpu), weights.map(|w| &w.gpu));
    close("h", &unit(clamped, &gate_up.cpu, on_cpu), &unit(clamped, &gate_up.gpu, on_gpu), 1.0)?;
    let (by_input, by_weight) = unit_backward(clamped, &dh.cpu, &gate_up.cpu, on_cpu);
    let (by_input_gpu, by_weight_gpu) = unit_backward(clamped, &dh.gpu, &gate_up.gpu, on_gpu);
    close("by gate and up", &by_input, &by_input_gpu, 2.0)?;
    match (by_weight, by_weight_gpu) {
        (Some(cpu), Some(gpu)) => close("by weight", &cpu, &gpu, 4.0),
        (None, None) => Ok(()),
        _ => Err("a gradient of weights on one device only".into()),
    }
}

fn gated<T: Float>(twin: &Twin, clamped: bool) -> Result<(), String> {
    for (rows, f) in SIZES {
        let (gate_up, dh) = (twin.normal::<T>([rows, 2 * f], 1), twin.normal::<T>([rows, f], 2));
        let weights = twin.normal::<T::Acc>([rows], 3);
        for weights in [None, Some(&weights)] {
            compare(clamped, &gate_up, &dh, weights).map_err(|e| format!("{rows} x {f}: {e}"))?;
        }
    }
    let (gate_up, dh) = (twin.normal::<T>([21, 14], 4), twin.normal::<T>([21, 7], 5));
    let slice = |x: &Pair<T>| Pair { cpu: x.cpu.slice_rows(1..20), gpu: x.gpu.slice_rows(1..20) };
    let weights = twin.normal::<T::Acc>([19], 6);
    compare(clamped, &slice(&gate_up), &slice(&dh), Some(&weights)).map_err(|e| format!("views: {e}"))
}

/// Rows of no columns still have a gradient by their weight: zero.
fn no_columns(twin: &Twin) -> Result<(), String> {
    let empty = |columns: usize| Tensor::<f32>::zeros(&twin.gpu, [3, columns], Category::Activation);
    let weights = twin.values([3], &[1.0f32, 2.0, 3.0]);
    let (gradient, by_weight) = swiglu_backward(&empty(0), &empty(0), Some(&weights.gpu));
    match (gradient.len(), by_weight.map(|w| w.to_vec())) {
        (0, Some(w)) if w == [0.0; 3] => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

fn pointwise<T: Float>(twin: &Twin) -> Result<(), String> {
    for n in [0, 1, 37, 512, 5003] {
        let (x, dy) = (twin.normal::<T>([n], 1), twin.normal::<T>([n], 2));
        close("silu", &silu_forward(&x.cpu), &silu_forward(&x.gpu), 1.0)?;
        close("silu slope", &silu_backward(&dy.cpu, &x.cpu), &silu_backward(&dy.gpu, &x.gpu), 1.0)?;
        for kind in [Gelu::Exact, Gelu::Tanh] {
            close("gelu", &gelu_forward(&x.cpu, kind), &gelu_forward(&x.gpu, kind), 1.0)
                .map_err(|e| format!("{kind:?}: {e}"))?;
            let (cpu, gpu) = (gelu_backward(&dy.cpu, &x.cpu, kind), gelu_backward(&dy.gpu, &x.gpu, kind));
            // The CPU's error function of f32 is within 2e-7 of the true one.
            close("gelu slope", &cpu, &gpu, 4.0).map_err(|e| format!("{kind:?}: {e}"))?;
        }
    }
    let x = twin.normal::<T>([301], 3);
    let (cpu, gpu) = (x.cpu.slice_rows(1..301), x.gpu.slice_rows(1..301));
    close("view", &silu_forward(&cpu), &silu_forward(&gpu), 1.0)
}

/// Where exponentials overflow and underflow.
fn ends(twin: &Twin) -> Result<(), String> {
    let values = [f32::NEG_INFINITY, -1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30, f32::NAN];
    let x = twin.values([values.len()], &values);
    close("silu", &silu_forward(&x.cpu), &silu_forward(&x.gpu), 1.0)?;
    for kind in [Gelu::Exact, Gelu::Tanh] {
        close("gelu", &gelu_forward(&x.cpu, kind), &gelu_forward(&x.gpu, kind), 1.0)?;
    }
    let pairs: Vec<f32> = values.iter().flat_map(|v| [*v, 1.5]).collect();
    let pairs = twin.values([values.len(), 2], &pairs);
    close("swiglu", &swiglu_forward(&pairs.cpu, None), &swiglu_forward(&pairs.gpu, None), 1.0)?;
    let (cpu, gpu) = (unit(true, &pairs.cpu, None), unit(true, &pairs.gpu, None));
    close("clamped", &cpu, &gpu, 1.0)
}

fn of_type<T: Float>(cases: &mut Cases) {
    case(cases, format!("activation: swiglu {}", T::DTYPE), |twin| gated::<T>(twin, false));
    case(cases, format!("activation: clamped swiglu {}", T::DTYPE), |twin| gated::<T>(twin, true));
    case(cases, format!("activation: silu, gelu {}", T::DTYPE), pointwise::<T>);
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<f32>(cases);
    of_type::<f64>(cases);
    of_type::<bf16>(cases);
    case(cases, "activation: no columns", no_columns);
    case(cases, "activation: ends of the range", ends);
}
