//! Launches of `materialised.cu`.

use super::super::cuda::{row_blocks, upload_runs};
use super::super::visible::Visibility;
use super::super::{AttentionGrads, Sizes};
use super::{Materialised, MaterialisedSpec};
use crate::arguments;
use crate::cuda::{Gpu, source::MATERIALISED};
use crate::dtype::{Element, Float};
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Threads of a block; rows and columns of its tile.
const THREADS: u32 = 256;
const SIDE: usize = 64;

/// One call on its GPU: sequences of s rows.
pub(super) struct Call<'a> {
    pub gpu: &'a Gpu,
    pub sizes: Sizes,
    pub s: usize,
}

impl Call<'_> {
    fn sequences(&self) -> usize {
        self.sizes.queries / self.s
    }

    /// A tile a block of the matrices [rows, columns] of so many heads.
    fn tiles(&self, heads: usize, columns: usize) -> [u32; 3] {
        Gpu::blocks(self.sequences() * heads * self.s.div_ceil(SIDE) * columns.div_ceil(SIDE), 1)
    }

    /// The matrices x y^T [b, h, s, s]: x rows of query heads, y rows of key heads.
    fn rows_by_rows<T: Float>(&self, x: &Tensor<T>, y: &Tensor<T>, width: usize) -> Tensor<T::Acc> {
        let (b, s, Sizes { heads, group, .. }) = (self.sequences(), self.s, self.sizes);
        let mut matrix = Tensor::empty(x.device(), [b, heads, s, s], Category::Workspace);
        let kernel = format!("rows_by_rows_{}", T::DTYPE);
        let arguments = arguments![x, y, &mut matrix, b, s, heads, group, width];
        self.gpu.launch(&MATERIALISED, &kernel, self.tiles(heads, s), THREADS, &arguments);
        matrix
    }

    /// Rows [t, h, width]: every matrix times rows of key heads.
    fn matrix_by_rows<M: Element, T: Float>(
        &self,
        matrix: &Tensor<M>,
        y: &Tensor<T>,
        width: usize,
    ) -> Tensor<T> {
        let (b, s, Sizes { queries, heads, group, .. }) = (self.sequences(), self.s, self.sizes);
        let mut rows = Tensor::empty(y.device(), [queries, heads, width], Category::Activation);
        let kernel = format!("matrix_by_rows_{}_{}", M::DTYPE, T::DTYPE);
        let arguments = arguments![matrix, y, &mut rows, b, s, heads, group, width];
        self.gpu.launch(&MATERIALISED, &kernel, self.tiles(heads, width), THREADS, &arguments);
        rows
    }

    /// Rows [t, kv, width]: every matrix turned, times rows of query heads, summed over the heads of a group.
    fn turned_by_rows<M: Element, T: Float>(
        &self,
        matrix: &Tensor<M>,
        x: &Tensor<T>,
        width: usize,
    ) -> Tensor<T> {
        let (b, s, Sizes { queries, heads, kv_heads, group, .. }) = (self.sequences(), self.s, self.sizes);
        let mut rows = Tensor::empty(x.device(), [queries, kv_heads, width], Category::Activation);
        let kernel = format!("turned_by_rows_{}_{}", M::DTYPE, T::DTYPE);
        let arguments = arguments![matrix, x, &mut rows, b, s, heads, group, width];
        self.gpu.launch(&MATERIALISED, &kernel, self.tiles(kv_heads, width), THREADS, &arguments);
        rows
    }

    /// [`super::materialised_probabilities`].
    pub fn probabilities<T: Float>(
        &self,
        q: &Tensor<T>,
        k: &Tensor<T>,
        spec: &MaterialisedSpec<'_>,
    ) -> Materialised<T> {
        let (device, s, Sizes { queries, keys, heads, d, .. }) = (q.device(), self.s, self.sizes);
        let visibility = Visibility::new(&spec.attention, queries, keys);
        for query in 0..queries {
            super::within_sequence(&visibility.of(query), query / s * s, s);
        }
        let runs = upload_runs(&visibility, q, queries);
        let scores = self.rows_by_rows(q, k, d);
        let mut probabilities = Tensor::<T>::empty(device, scores.shape(), Category::Activation);
        let mut dropped = spec.dropout.map(|_| {
            let left = Tensor::<T>::empty(device, scores.shape(), Category::Activation);
            (left, Tensor::<u8>::empty(device, scores.shape(), Category::Activation))
        });
        let (left, mask) = dropped.as_mut().map(|(left, mask)| (left, mask)).unzip();
        let (first_token, first_head, all_heads, draws) = spec
            .dropout
            .map_or((0, 0, heads, (0, 0, 0)), |d| (d.first_token, d.first_head, d.heads, d.dropout.draws()));
        assert!(first_head + heads <= all_heads, "heads {first_head}.. of {all_heads}");
        let (purpose, seed, threshold) = draws;
        let (scale, keep) = factors::<T>(spec);
        let rows = self.sequences() * heads * s;
        let arguments = arguments![
            &scores,
            &runs,
            &mut probabilities,
            mask,
            left,
            rows,
            s,
            heads,
            scale,
            keep,
            first_token,
            first_head,
            all_heads,
            purpose,
            seed,
            threshold
        ];
        let kernel = format!("materialised_softmax_{}", T::DTYPE);
        self.gpu.launch(&MATERIALISED, &kernel, row_blocks(rows), THREADS, &arguments);
        Materialised { probabilities_bhss: probabilities, dropped }
    }

    /// Output of [`super::materialised_forward`].
    pub fn output<T: Float>(&self, saved: &Materialised<T>, v: &Tensor<T>) -> Tensor<T> {
        self.matrix_by_rows(saved.factors_bhss(), v, self.sizes.dv)
    }

    /// [`super::materialised_backward`].
    pub fn backward<T: Float>(
        &self,
        dout: &Tensor<T>,
        (q, k, v): (&Tensor<T>, &Tensor<T>, &Tensor<T>),
        saved: &Materialised<T>,
        spec: &MaterialisedSpec<'_>,
    ) -> AttentionGrads<T> {
        let (s, Sizes { heads, d, dv, .. }) = (self.s, self.sizes);
        let mut dscores = self.rows_by_rows(dout, v, dv);
        let probabilities = &saved.probabilities_bhss;
        assert_eq!(dscores.shape(), probabilities.shape(), "probabilities of these rows");
        let mask = saved.dropped.as_ref().map(|(_, mask)| mask);
        let (scale, keep) = factors::<T>(spec);
        let rows = self.sequences() * heads * s;
        let kernel = format!("materialised_softmax_backward_{}", T::DTYPE);
        let arguments = arguments![&mut dscores, probabilities, mask, rows, s, scale, keep];
        self.gpu.launch(&MATERIALISED, &kernel, row_blocks(rows), THREADS, &arguments);
        let (dq, dk) = (self.matrix_by_rows(&dscores, k, d), self.turned_by_rows(&dscores, q, d));
        drop(dscores);
        AttentionGrads { dq, dk, dv: self.turned_by_rows(saved.factors_bhss(), dout, dv), dsinks: None }
    }
}

/// Factor on the scores, and on the probabilities that stay.
fn factors<T: Float>(spec: &MaterialisedSpec<'_>) -> (T::Acc, T::Acc) {
    let keep = spec.dropout.map_or(1.0, |d| d.dropout.scale());
    (T::Acc::from_f64(spec.attention.scale), T::Acc::from_f64(keep))
}
