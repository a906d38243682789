//! Attention that keeps its probabilities: with and without dropout, whose masks must be the same bits, shared key heads,
//! windows, several tiles of every product.

use super::twin::{close, same};
use super::{Cases, Twin, case};
use crate::bf16;
use crate::dtype::Float;
use crate::ops::attention::{
    AttentionSpec, Materialised, MaterialisedSpec, ScoreDropout, materialised_backward, materialised_forward,
    materialised_probabilities,
};
use crate::ops::dropout::Dropout;
use crate::rng::{Purpose, Stream};

/// Sequence length, documents, query heads, key heads, width of q and k, of v.
type Size = (usize, &'static [usize], usize, usize, usize, usize);

const SIZES: [Size; 5] = [
    (4, &[0, 0], 2, 1, 3, 3),
    (1, &[0, 1, 2], 2, 2, 3, 5),
    (6, &[0, 2, 6, 12], 4, 2, 7, 5),
    (9, &[0, 9, 9, 12, 18, 27], 3, 1, 6, 5),
    (70, &[0, 70, 130, 140], 2, 1, 17, 66),
];

fn both_passes<T: Float>(
    twin: &Twin,
    (s, documents, heads, kv, d, dv): Size,
    drops: bool,
) -> Result<(), String> {
    let (what, t) = (format!("{s} {documents:?} {heads}/{kv}"), documents[documents.len() - 1]);
    let (q, k) = (twin.normal::<T>([t, heads, d], 1), twin.normal::<T>([t, kv, d], 2));
    let (v, dout) = (twin.normal::<T>([t, kv, dv], 3), twin.normal::<T>([t, heads, dv], 4));
    let dropout = Dropout::new(Stream::new(3, Purpose::Dropout(1)), 0.3);
    let dropout = drops.then_some(ScoreDropout { dropout, first_token: 41, first_head: 1, heads: heads + 2 });
    let attention = AttentionSpec { window: drops.then_some(5), ..AttentionSpec::causal(0.4, documents) };
    let spec = MaterialisedSpec { attention, sequence: s, dropout };
    let (out, saved) = materialised_forward(&q.cpu, &k.cpu, &v.cpu, &spec);
    let (out_gpu, saved_gpu) = materialised_forward(&q.gpu, &k.gpu, &v.gpu, &spec);
    close(&format!("{what} probabilities"), &saved.probabilities_bhss, &saved_gpu.probabilities_bhss, 2.0)?;
    close(&format!("{what} out"), &out, &out_gpu, 4.0)?;
    let again = materialised_probabilities(&q.gpu, &k.gpu, &v.gpu, &spec);
    same(&format!("{what} again"), &saved_gpu.probabilities_bhss, &again.probabilities_bhss)?;
    match (&saved.dropped, &saved_gpu.dropped, &again.dropped) {
        (None, None, None) => {}
        (Some((left, mask)), Some((left_gpu, mask_gpu)), Some((_, mask_again))) => {
            same(&format!("{what} mask"), mask, mask_gpu)?;
            same(&format!("{what} mask again"), mask, mask_again)?;
            close(&format!("{what} what stays"), left, left_gpu, 2.0)?;
        }
        _ => return Err(format!("{what}: a mask on one side only")),
    }
    // The backward of both from the same probabilities.
    let copy = Materialised {
        probabilities_bhss: saved.probabilities_bhss.to_device(&twin.gpu),
        dropped: saved.dropped.as_ref().map(|(a, b)| (a.to_device(&twin.gpu), b.to_device(&twin.gpu))),
    };
    let cpu = materialised_backward(&dout.cpu, (&q.cpu, &k.cpu, &v.cpu), &saved, &spec);
    let gpu = materialised_backward(&dout.gpu, (&q.gpu, &k.gpu, &v.gpu), &copy, &spec);
    close(&format!("{what} dq"), &cpu.dq, &gpu.dq, 4.0)?;
    close(&format!("{what} dk"), &cpu.dk, &gpu.dk, 4.0)?;
    close(&format!("{what} dv"), &cpu.dv, &gpu.dv, 4.0)
}

fn of_type<T: Float>(cases: &mut Cases) {
    for (name, drops) in [("", false), (" with dropout", true)] {
        case(cases, format!("materialised attention{name} {}", T::DTYPE), move |twin| {
            SIZES.into_iter().try_for_each(|size| both_passes::<T>(twin, size, drops))
        });
    }
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<f32>(cases);
    of_type::<f64>(cases);
    of_type::<bf16>(cases);
}
