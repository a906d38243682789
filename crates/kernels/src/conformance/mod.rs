//! What every GPU must pass: each operation on it beside the same operation on the CPU, forward and backward, for every
//! element type, on ordinary and odd sizes and on no rows. Tests run the cases on emulated GPUs in several orders of
//! threads and streams; `plica selftest --device cuda` runs them on a card.

mod activation;
mod adamw;
mod attention;
mod capacity;
mod copy;
mod cross_entropy;
mod dropout;
mod elementwise;
mod embedding;
mod gemm;
mod grouped_gemm;
mod materialised;
mod norm;
mod permute;
mod reduce;
mod rope;
mod router;
mod tensor_attention;
mod topk;
mod twin;

pub use twin::Twin;

use crate::device::Device;

/// One check of a device.
pub struct Case {
    /// Family and what is checked: `norm: rms backward bf16`.
    pub name: String,
    /// Runs it; the text of what is wrong.
    pub run: Box<dyn Fn(&Device) -> Result<(), String> + Send + Sync>,
}

/// The cases of one family, as it lists them.
pub(crate) type Cases = Vec<Case>;

/// Adds a case.
pub(crate) fn case(
    cases: &mut Cases,
    name: impl Into<String>,
    run: impl Fn(&Twin) -> Result<(), String> + Send + Sync + 'static,
) {
    let run = move |gpu: &Device| run(&Twin::new(gpu));
    cases.push(Case { name: name.into(), run: Box::new(run) });
}

/// Every case, family by family.
pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    activation::cases(&mut all);
    adamw::cases(&mut all);
    attention::cases(&mut all);
    capacity::cases(&mut all);
    copy::cases(&mut all);
    cross_entropy::cases(&mut all);
    dropout::cases(&mut all);
    elementwise::cases(&mut all);
    embedding::cases(&mut all);
    gemm::cases(&mut all);
    grouped_gemm::cases(&mut all);
    materialised::cases(&mut all);
    norm::cases(&mut all);
    permute::cases(&mut all);
    reduce::cases(&mut all);
    rope::cases(&mut all);
    router::cases(&mut all);
    tensor_attention::cases(&mut all);
    topk::cases(&mut all);
    all
}
