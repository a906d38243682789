//! AdamW: the same bits as on the CPU, over whole tensors and over runs, with and without a master copy.

use super::twin::{Pair, same};
use super::{Cases, Twin, case};
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::adamw::{AdamW, adamw_run, adamw_run_rounded, adamw_step, adamw_step_rounded};
use crate::{Tensor, bf16};

const SETTINGS: AdamW = AdamW {
    lr: 3e-3,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 3,
    clip_coefficient: 0.37,
};

/// Master weights, moments (the second one not negative), and a gradient with zeros in it.
fn state<A: Real>(twin: &Twin, n: usize) -> [Pair<A>; 4] {
    let [master, m, v, mut grad] = [1, 2, 3, 4].map(|seed| twin.normal::<A>([n], seed));
    let squares: Vec<A> = v.cpu.to_vec().iter().map(|x| *x * *x).collect();
    let zeros: Vec<A> = grad
        .cpu
        .to_vec()
        .iter()
        .enumerate()
        .map(|(i, x)| if i % 5 == 0 { A::default() } else { *x })
        .collect();
    grad = twin.values([n], &zeros);
    [master, m, twin.values([n], &squares), grad]
}

/// Runs `f(master, m, v, gradient)` on both devices and compares the first three and what it returns.
fn compare<A: Real, T: Float>(
    what: &str,
    mut state: [Pair<A>; 4],
    f: impl Fn([&mut Tensor<A>; 3], &Tensor<A>, bool) -> Tensor<T>,
) -> Result<(), String> {
    let [master, m, v, grad] = &mut state;
    let cpu = f([&mut master.cpu, &mut m.cpu, &mut v.cpu], &grad.cpu, false);
    let gpu = f([&mut master.gpu, &mut m.gpu, &mut v.gpu], &grad.gpu, true);
    same(&format!("{what}: weight"), &cpu, &gpu)?;
    for (name, pair) in [("master", master), ("m", m), ("v", v)] {
        same(&format!("{what}: {name}"), &pair.cpu, &pair.gpu)?;
    }
    Ok(())
}

fn updates<T: Float>(twin: &Twin) -> Result<(), String> {
    let device = |gpu: bool| if gpu { &twin.gpu } else { &twin.cpu };
    let weights = |gpu: bool, n: usize| Tensor::<T>::zeros(device(gpu), [n], Category::Parameter);
    for n in [0, 1, 37, 4100] {
        compare("step", state::<T::Acc>(twin, n), |[master, m, v], grad, gpu| {
            adamw_step(master, m, v, grad, &SETTINGS);
            weights(gpu, n)
        })?;
        compare("rounded step", state::<T::Acc>(twin, n), |[master, m, v], grad, gpu| {
            let mut weight = weights(gpu, n);
            adamw_step_rounded(master, m, v, grad, &SETTINGS, &mut weight);
            weight
        })?;
    }
    for (start, grad_start, len) in [(0, 0, 800), (8, 16, 780), (3, 5, 777), (5, 0, 0), (900, 900, 100)] {
        let settings = AdamW { clip_coefficient: 1.0, weight_decay: 0.0, step: 1, ..SETTINGS };
        compare("run", state::<T::Acc>(twin, 1000), |[master, m, v], grad, gpu| {
            adamw_run((master, start / 2), [m, v], start, (grad, grad_start), len, &settings);
            weights(gpu, 1)
        })?;
        compare("rounded run", state::<T::Acc>(twin, 1000), |state, grad, gpu| {
            let mut weight = weights(gpu, 1000);
            adamw_run_rounded(state, start, (grad, grad_start), len, &settings, (&mut weight, start / 2));
            weight
        })?;
    }
    Ok(())
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    case(cases, "adamw: f32", updates::<f32>);
    case(cases, "adamw: f64", updates::<f64>);
    case(cases, "adamw: bf16", updates::<bf16>);
}
