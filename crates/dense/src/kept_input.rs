//! The input of a column-parallel layer, as its forward keeps it for the weight gradient: all rows as they were
//! gathered over TP, or this rank's rows alone, gathered once more when the backward asks. The second choice keeps
//! 1/t of the bytes and moves q·bsh(t-1)/t bytes more a layer. Source: arXiv 2205.05198, section 4.2.2.

use plica_kernels::{Float, Tensor};

use crate::cx::{Cx, Trainable};
use crate::error::Error;

/// See the module text.
#[derive(Debug)]
pub enum KeptInput<T: Float> {
    /// All T rows.
    Whole(Tensor<T>),
    /// This TP rank's rows.
    Own(Tensor<T>),
}

impl<T: Trainable> KeptInput<T> {
    /// What a forward keeps of the rows `own_td` that it gathered to `whole_td`. A recomputed block runs its
    /// forward again right before its backward; it then keeps all rows.
    pub fn keep(whole_td: Tensor<T>, own_td: &Tensor<T>, cx: &Cx<T>) -> KeptInput<T> {
        match cx.recompute.tp_input && !cx.recompute.block {
            true => KeptInput::Own(own_td.clone()),
            false => KeptInput::Whole(whole_td),
        }
    }

    /// What is kept of all rows: see [`KeptInput::keep`].
    pub fn again(self, own_td: &Tensor<T>, cx: &Cx<T>) -> KeptInput<T> {
        match self {
            KeptInput::Whole(whole_td) => KeptInput::keep(whole_td, own_td, cx),
            own => own,
        }
    }

    /// All rows.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn whole(self, cx: &Cx<T>) -> Result<Tensor<T>, Error> {
        match self {
            KeptInput::Whole(x_td) => Ok(x_td),
            KeptInput::Own(x_td) => cx.gather_tokens(&x_td),
        }
    }
}
