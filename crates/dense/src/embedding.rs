//! Vocabulary-parallel embedding: `x = table[ids]`. The table `[V, d]` is cut by rows over TP, V padded to a multiple
//! of TP; each rank looks up the ids that it holds, and a reduce-scatter of token rows sums (one term each) and
//! cuts the result for sequence parallelism. The padded rows are never looked up. Source: Megatron-LM (arXiv
//! 1909.08053, section 3).

use plica_folding::axis::Axis;
use plica_kernels::ops::embedding;
use plica_kernels::{Float, Tensor};

use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::param::{Init, ParamId, ParamSpec, ParamSpecs, Slicing};
use crate::phases::Phase;

/// A table [vocabulary, width] that is cut by rows over TP.
pub(crate) fn table_spec(name: &str, (vocabulary, width): (usize, usize), init: Init) -> ParamSpec {
    let spec = ParamSpec::replicated(name, &[vocabulary, width], true, init);
    spec.cut(Slicing::padded(0, Axis::Tp, vocabulary))
}

/// Declares such a table.
pub(crate) fn declare_table(
    specs: &mut ParamSpecs,
    name: &str,
    sizes: (usize, usize),
    init: Init,
) -> ParamId {
    specs.add(table_spec(name, sizes, init))
}

/// First id of this rank's rows of such a table.
pub(crate) fn first_id<T: Float>(table: ParamId, cx: &Cx<T>) -> usize {
    cx.params.local_shape(table)[0] * cx.params.place().coordinate(Axis::Tp)
}

/// A token embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embedding {
    table: ParamId,
}

impl Embedding {
    /// Declares the table [`vocabulary`, `width`].
    pub fn new(specs: &mut ParamSpecs, name: &str, vocabulary: usize, width: usize, init: Init) -> Embedding {
        Embedding { table: declare_table(specs, name, (vocabulary, width), init) }
    }

    /// Handle of the table, for a tied head.
    pub fn table(&self) -> ParamId {
        self.table
    }

    /// This TP rank's token rows [t, d].
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn forward<T: Trainable>(&self, cx: &Cx<T>) -> Result<Tensor<T>, Error> {
        let _phase = cx.phase(Phase::Embedding);
        let first_id = first_id(self.table, cx);
        let x_td = embedding::embedding_forward(&cx.weight(self.table), &cx.tokens.ids, first_id);
        cx.scatter_tokens(x_td)
    }

    /// Adds to the gradient of the table from this TP rank's rows `dx_td`.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn backward<T: Trainable>(&self, dx_td: &Tensor<T>, cx: &mut Cx<T>) -> Result<(), Error> {
        let _phase = cx.phase(Phase::Embedding);
        let (dx_td, ids) = (cx.gather_tokens(dx_td)?, cx.tokens.ids.clone());
        let first_id = first_id(self.table, cx);
        cx.weight_grad(self.table, move |grad| embedding::embedding_backward(&dx_td, &ids, first_id, grad));
        Ok(())
    }
}
