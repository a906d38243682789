//! Dropout: the same marks at every global index, from any first one on; forward, and backward from the mask.

use super::twin::{Twin, same};
use super::{Cases, case};
use crate::bf16;
use crate::dtype::Float;
use crate::ops::dropout::Dropout;
use crate::rng::{Purpose, Stream};

const SIZES: [usize; 6] = [0, 1, 37, 512, 4096, 5003];
/// Of whole packs, of whole counters, of neither; beyond 32 bits.
const FIRSTS: [u64; 5] = [0, 16, 4, 7, (1 << 34) + 1];

fn dropout() -> Dropout {
    Dropout::new(Stream::new((9 << 32) + 3, Purpose::Dropout(5)), 0.3)
}

fn masks(twin: &Twin) -> Result<(), String> {
    let dropout = dropout();
    for n in SIZES {
        for first in FIRSTS {
            let (cpu, gpu) = (dropout.mask(&twin.cpu, [n], first), dropout.mask(&twin.gpu, [n], first));
            same("mask", &cpu, &gpu).map_err(|e| format!("{n} from {first}: {e}"))?;
        }
    }
    Ok(())
}

fn of_type<T: Float>(cases: &mut Cases) {
    case(cases, format!("dropout: {}", T::DTYPE), |twin| {
        let dropout = dropout();
        for n in SIZES {
            let (x, dy) = (twin.normal::<T>([n], 1), twin.normal::<T>([n], 2));
            for first in FIRSTS {
                let (y, mask) = dropout.forward(&x.cpu, first);
                let (y_gpu, mask_gpu) = dropout.forward(&x.gpu, first);
                same("mask", &mask, &mask_gpu)?;
                same("y", &y, &y_gpu)?;
                same("dx", &dropout.apply(&dy.cpu, &mask), &dropout.apply(&dy.gpu, &mask_gpu))?;
            }
        }
        let (x, mask) = (twin.normal::<T>([300], 3), dropout.mask(&twin.gpu, [300], 0));
        let on_cpu = dropout.mask(&twin.cpu, [300], 0).slice_rows(1..300);
        let y = dropout.apply(&x.cpu.slice_rows(1..300), &on_cpu);
        same("view", &y, &dropout.apply(&x.gpu.slice_rows(1..300), &mask.slice_rows(1..300)))
    });
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    case(cases, "dropout: masks", masks);
    of_type::<f32>(cases);
    of_type::<f64>(cases);
    of_type::<bf16>(cases);
}
