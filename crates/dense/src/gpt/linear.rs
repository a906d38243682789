//! Linear layers with a bias, y = x Wᵀ + b. Column-parallel: weight and bias cut by outputs. Row-parallel: weight
//! cut by inputs, the bias whole and added once, to the sum of the ranks' partial rows.

use plica_folding::axis::Axis;
use plica_kernels::ops::{elementwise, gemm};
use plica_kernels::{Float, Tensor};

use super::rows::Rows;
use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::linear::Linear;
use crate::param::{Init, ParamId, ParamSpec, ParamSpecs, Slicing};

/// A column-parallel layer of one or more fused segments.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    linear: Linear,
    bias: ParamId,
}

impl Column {
    /// Declares `NAME` [sum of segments, `input`] and `NAME_bias`; a segment SEG replaces the last component of
    /// both names by `SEG` and `SEG_bias`.
    pub fn new(
        specs: &mut ParamSpecs,
        name: &str,
        segments: &[(&str, usize)],
        input: usize,
        init: Init,
    ) -> Column {
        let linear = Linear::column(specs, name, segments, input, init);
        let names: Vec<String> = segments.iter().map(|(segment, _)| format!("{segment}_bias")).collect();
        let biases: Vec<(&str, usize)> =
            names.iter().zip(segments).map(|(name, (_, size))| (name.as_str(), *size)).collect();
        let output = segments.iter().map(|(_, size)| size).sum();
        let spec = ParamSpec::replicated(format!("{name}_bias"), &[output], false, Init::Zeros);
        Column { linear, bias: specs.add(spec.cut(Slicing::fused(0, Axis::Tp, &biases))) }
    }

    /// Outputs `start ..` of `width` columns of this rank, [T, width].
    pub fn forward_part<T: Float>(
        &self,
        x_td: &Tensor<T>,
        (start, width): (usize, usize),
        cx: &Cx<T>,
    ) -> Tensor<T> {
        let part = start..start + width;
        let mut y = gemm::matmul_nt(x_td, &cx.weight(self.linear.weight()).slice_rows(part.clone()));
        elementwise::add_bias(&mut y, &cx.weight(self.bias).slice_rows(part));
        y
    }

    /// The part of the input's gradient that this rank's columns give.
    pub fn backward<T: Trainable>(&self, dy: Tensor<T>, x_td: Tensor<T>, cx: &mut Cx<T>) -> Tensor<T> {
        let rows = dy.clone();
        cx.weight_grad(self.bias, move |grad| elementwise::accumulate_column_sums(grad, &rows));
        self.linear.backward(dy, x_td, cx)
    }
}

/// A row-parallel layer.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    linear: Linear,
    bias: ParamId,
    rows: Rows,
}

impl Row {
    /// Declares `NAME` [`output`, `input`] and `NAME_bias` `[output]`.
    pub fn new(
        specs: &mut ParamSpecs,
        name: &str,
        (output, input): (usize, usize),
        init: Init,
        rows: Rows,
    ) -> Row {
        let linear = Linear::row(specs, name, output, input, init);
        let spec = ParamSpec::replicated(format!("{name}_bias"), &[output], false, Init::Zeros);
        Row { linear, bias: specs.add(spec), rows }
    }

    /// This rank's rows of the output.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn forward<T: Trainable>(&self, x: &Tensor<T>, cx: &Cx<T>) -> Result<Tensor<T>, Error> {
        let mut y_td = self.rows.leave(self.linear.forward(x, cx), cx)?;
        elementwise::add_bias(&mut y_td, &cx.weight(self.bias));
        Ok(y_td)
    }

    /// Gradient of this rank's columns of the input, all rows, from the gradient of its rows of the output.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn backward<T: Trainable>(
        &self,
        dy_td: Tensor<T>,
        x: Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<Tensor<T>, Error> {
        let whole = self.rows.enter(&dy_td, cx)?;
        if self.rows.gives_gradient(cx) {
            cx.weight_grad(self.bias, move |grad| elementwise::accumulate_column_sums(grad, &dy_td));
        }
        Ok(self.linear.backward(whole, x, cx))
    }
}
