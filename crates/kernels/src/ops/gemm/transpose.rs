//! Transposing a strided block, 16 x 16 elements at a time. For f32 on machines with AVX-512 a block is turned
//! inside registers (four rounds of shuffles); otherwise through a small array. Pure copying: no bit changes.

use crate::dtype::Element;

/// Side of a block.
const SIDE: usize = 16;

/// out[j * out_stride + i] = source[i * source_stride + j] for i in 0..rows, j in 0..columns.
///
/// # Panics
/// When a part passes its slice.
pub(crate) fn transpose<A: Element>(
    (out, out_stride): (&mut [A], usize),
    (source, source_stride): (&[A], usize),
    rows: usize,
    columns: usize,
) {
    if rows == 0 || columns == 0 {
        return;
    }
    assert!((columns - 1) * out_stride + rows <= out.len() && rows <= out_stride, "result of a transpose");
    assert!((rows - 1) * source_stride + columns <= source.len() && columns <= source_stride, "source");
    for i in (0..rows).step_by(SIDE) {
        for j in (0..columns).step_by(SIDE) {
            let (height, width) = ((rows - i).min(SIDE), (columns - j).min(SIDE));
            let (from, to) = (&source[i * source_stride + j..], &mut out[j * out_stride + i..]);
            if height == SIDE && width == SIDE {
                full_block((to, out_stride), (from, source_stride));
            } else {
                for a in 0..height {
                    for b in 0..width {
                        to[b * out_stride + a] = from[a * source_stride + b];
                    }
                }
            }
        }
    }
}

fn full_block<A: Element>((out, out_stride): (&mut [A], usize), (source, source_stride): (&[A], usize)) {
    #[cfg(target_feature = "avx512f")]
    if std::any::TypeId::of::<A>() == std::any::TypeId::of::<f32>() {
        let (out, source) = (bytemuck::cast_slice_mut(out), bytemuck::cast_slice(source));
        return wide::full_block((out, out_stride), (source, source_stride));
    }
    let mut block = [[A::default(); SIDE]; SIDE];
    for (i, row) in block.iter_mut().enumerate() {
        row.copy_from_slice(&source[i * source_stride..][..SIDE]);
    }
    for j in 0..SIDE {
        for (to, row) in out[j * out_stride..][..SIDE].iter_mut().zip(&block) {
            *to = row[j];
        }
    }
}

#[cfg(target_feature = "avx512f")]
mod wide {
    use super::SIDE;
    use std::arch::x86_64::{
        __m512, _mm512_castpd_ps, _mm512_castps_pd, _mm512_loadu_ps, _mm512_setzero_ps, _mm512_shuffle_f32x4,
        _mm512_storeu_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
    };

    /// The even (`0x88`) or odd (`0xdd`) quarters of two registers.
    const EVEN: i32 = 0x88;
    const ODD: i32 = 0xdd;

    /// One block of 16 x 16.
    pub(super) fn full_block(
        (out, out_stride): (&mut [f32], usize),
        (source, source_stride): (&[f32], usize),
    ) {
        let mut rows = [zero(); SIDE];
        for (i, row) in rows.iter_mut().enumerate() {
            let from = &source[i * source_stride..][..SIDE];
            // SAFETY: 16 floats follow (the slice was cut to them); the build's target has AVX-512.
            *row = unsafe { _mm512_loadu_ps(from.as_ptr()) };
        }
        for (j, column) in turned(rows).into_iter().enumerate() {
            let to = &mut out[j * out_stride..][..SIDE];
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), column) };
        }
    }

    fn zero() -> __m512 {
        // SAFETY: the build's target has AVX-512, as everywhere in this module.
        unsafe { _mm512_setzero_ps() }
    }

    /// Columns of 16 rows: pairs of rows are woven by elements, then by pairs of elements, after which register
    /// 4 g + j holds, in its quarter l, column 4 l + j of rows 4 g .. 4 g + 4; two rounds gather the quarters.
    #[inline(always)]
    fn turned(rows: [__m512; SIDE]) -> [__m512; SIDE] {
        let (mut pairs, mut fours, mut columns) = ([zero(); SIDE], [zero(); SIDE], [zero(); SIDE]);
        // SAFETY: register arithmetic only; the build's target has AVX-512.
        unsafe {
            for i in 0..8 {
                pairs[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                pairs[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
            }
            for g in 0..4 {
                for h in 0..2 {
                    let a = _mm512_castps_pd(pairs[4 * g + h]);
                    let b = _mm512_castps_pd(pairs[4 * g + 2 + h]);
                    fours[4 * g + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                    fours[4 * g + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
                }
            }
            for j in 0..4 {
                let (a, b, c, d) = (fours[j], fours[4 + j], fours[8 + j], fours[12 + j]);
                let (low_even, low_odd) =
                    (_mm512_shuffle_f32x4::<EVEN>(a, b), _mm512_shuffle_f32x4::<ODD>(a, b));
                let (high_even, high_odd) =
                    (_mm512_shuffle_f32x4::<EVEN>(c, d), _mm512_shuffle_f32x4::<ODD>(c, d));
                columns[j] = _mm512_shuffle_f32x4::<EVEN>(low_even, high_even);
                columns[8 + j] = _mm512_shuffle_f32x4::<ODD>(low_even, high_even);
                columns[4 + j] = _mm512_shuffle_f32x4::<EVEN>(low_odd, high_odd);
                columns[12 + j] = _mm512_shuffle_f32x4::<ODD>(low_odd, high_odd);
            }
        }
        columns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_element<A: Element>(value: impl Fn(usize) -> A) {
        for (rows, columns, extra) in
            [(0, 3, 0), (1, 1, 0), (16, 16, 0), (35, 50, 3), (64, 16, 1), (15, 33, 0)]
        {
            let (source_stride, out_stride) = (columns + extra, rows + 2 * extra);
            let source: Vec<A> = (0..rows * source_stride).map(&value).collect();
            let mut out = vec![A::POISON; columns * out_stride];
            transpose((&mut out, out_stride), (&source, source_stride), rows, columns);
            for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
                assert_eq!(
                    out[j * out_stride + i],
                    source[i * source_stride + j],
                    "{rows} x {columns}: {i}, {j}"
                );
            }
        }
    }

    #[test]
    fn every_element_moves_to_its_place() {
        every_element(|i| i as f32);
        every_element(|i| i as f64);
    }
}
