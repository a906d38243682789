//! Global <-> local: a rank's part of a parameter as boxes of layout-free tensors. A fused or expert-stacked
//! parameter consists of several such tensors (`q`, `k`, `v`; one an expert); a [`Piece`] says which index
//! ranges of one of them this rank holds, and where they lie in the local tensor. Where the parameter is sharded
//! a rank keeps a run of the local tensor's elements; [`Piece::within`] is the part of a piece inside that run.
//! Checkpoints, initial values and the comparison of layouts all go through pieces.

use std::ops::Range;

use plica_folding::axis::Axis;
use plica_kernels::{Element, Tensor};

use crate::error::Error;
use crate::param::spec::{ParamSpec, check_divides};
use crate::place::Place;

/// This rank's part of one layout-free tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Name of the layout-free tensor.
    pub name: String,
    /// Its global shape.
    pub shape: Vec<usize>,
    /// The part that this rank holds: an index range a dim. May be empty (padded vocabulary).
    pub ranges: Vec<Range<usize>>,
    /// Where that part lies in the local tensor, a range a dim of the local tensor. An expert stack has one dim
    /// more than the piece: the first one, of length 1.
    local: Vec<Range<usize>>,
    /// The run of the local tensor's elements that is kept; none: all of it.
    window: Option<Window>,
}

/// A run of the elements of a local tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Window {
    /// Shape of the whole local tensor.
    shape: Vec<usize>,
    /// Flat elements of it that are kept.
    range: Range<usize>,
    /// Where the first of them stands in the tensor that keeps them.
    at: usize,
    /// Elements of the piece inside the run.
    len: usize,
}

impl Piece {
    /// Number of elements that this rank holds.
    pub fn len(&self) -> usize {
        match &self.window {
            None => self.ranges.iter().map(|r| r.len()).product(),
            Some(window) => window.len,
        }
    }

    /// What of this piece lies in the flat elements `range` of the local tensor of shape `local_shape`. The
    /// elements are kept in another tensor, the first one of the range at its element `at`.
    ///
    /// # Panics
    /// When the range leaves the local tensor.
    pub fn within(&self, local_shape: &[usize], range: Range<usize>, at: usize) -> Piece {
        let size: usize = local_shape.iter().product();
        assert!(range.start <= range.end && range.end <= size, "elements {range:?} of {size}");
        let window = Window { shape: local_shape.to_vec(), range, at, len: 0 };
        let mut piece = Piece { window: Some(window), ..self.clone() };
        let mut len = 0;
        piece.runs(local_shape, |_, _, run| len += run);
        piece.window.as_mut().expect("set above").len = len;
        piece
    }

    /// Whether this rank holds none of it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Calls `f(global row-major index of the first element, offset in the keeping tensor, length)` for every
    /// contiguous run.
    fn runs(&self, local_shape: &[usize], mut f: impl FnMut(usize, usize, usize)) {
        let Some(Window { shape, range, at, .. }) = &self.window else {
            return self.box_runs(local_shape, f);
        };
        self.box_runs(shape, |global, offset, len| {
            let (start, end) = (offset.max(range.start), (offset + len).min(range.end));
            if start < end {
                f(global + start - offset, start - range.start + at, end - start);
            }
        });
    }

    /// The same for the whole piece in the whole local tensor.
    fn box_runs(&self, local_shape: &[usize], mut f: impl FnMut(usize, usize, usize)) {
        if self.ranges.iter().any(|r| r.is_empty()) {
            return;
        }
        let extra = self.local.len() - self.ranges.len();
        let last = local_shape.len() - 1;
        let mut at: Vec<usize> = self.local.iter().map(|r| r.start).collect();
        loop {
            let offset = at.iter().zip(local_shape).fold(0, |o, (i, n)| o * n + i);
            let global = (0..self.shape.len()).fold(0, |g, d| {
                g * self.shape[d] + self.ranges[d].start + at[d + extra] - self.local[d + extra].start
            });
            f(global, offset, self.local[last].len());
            // Next row: the last dim is covered by the run.
            let mut dim = last;
            loop {
                if dim == 0 {
                    return;
                }
                dim -= 1;
                at[dim] += 1;
                if at[dim] < self.local[dim].end {
                    break;
                }
                at[dim] = self.local[dim].start;
            }
        }
    }

    /// Copies this part out of a local tensor (the parameter or anything of its shape, e.g. a moment), or out of
    /// the tensor that keeps the run of [`Piece::within`].
    pub fn copy_out<E: Element>(&self, local: &Tensor<E>) -> Vec<E> {
        // Of a stack of experts, which is one tensor with many pieces, no more than this one.
        let mut values = Vec::with_capacity(self.len());
        if let Some(all) = local.host() {
            self.runs(local.dims(), |_, offset, len| values.extend_from_slice(&all[offset..offset + len]));
            return values;
        }
        for run in self.local_runs(local.dims()) {
            let done = values.len();
            values.resize(done + run.len(), E::default());
            local.read_at(run.start, &mut values[done..]);
        }
        values
    }

    /// The elements of the local tensor, as few runs as there can be.
    fn local_runs(&self, local_shape: &[usize]) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        self.runs(local_shape, |_, offset, len| match runs.last_mut() {
            Some(last) if last.end == offset => last.end += len,
            _ => runs.push(offset..offset + len),
        });
        runs
    }

    /// Copies values (row-major, in the order of [`Piece::copy_out`]) into a local tensor.
    ///
    /// # Panics
    /// When the number of values is wrong, or the tensor is shared.
    pub fn copy_in<E: Element>(&self, local: &mut Tensor<E>, values: &[E]) {
        assert_eq!(values.len(), self.len(), "values of {}", self.name);
        let shape = local.shape();
        let mut done = 0;
        if let Some(data) = local.host_mut() {
            self.runs(shape.dims(), |_, offset, len| {
                data[offset..offset + len].copy_from_slice(&values[done..done + len]);
                done += len;
            });
            return;
        }
        for run in self.local_runs(shape.dims()) {
            local.write_at(run.start, &values[done..done + run.len()]);
            done += run.len();
        }
    }

    /// Cuts this rank's part out of the complete layout-free tensor.
    ///
    /// # Panics
    /// When `complete` has not the global number of elements.
    pub fn select<E: Copy>(&self, complete: &[E]) -> Vec<E> {
        assert_eq!(
            complete.len(),
            self.shape.iter().product::<usize>(),
            "values of the complete {}",
            self.name
        );
        let mut values = Vec::with_capacity(self.len());
        self.global_runs(|global, len| values.extend_from_slice(&complete[global..global + len]));
        values
    }

    /// Puts this rank's values into the complete layout-free tensor.
    ///
    /// # Panics
    /// When a length is wrong.
    pub fn place<E: Copy>(&self, complete: &mut [E], values: &[E]) {
        assert_eq!(values.len(), self.len(), "values of {}", self.name);
        let mut done = 0;
        self.global_runs(|global, len| {
            complete[global..global + len].copy_from_slice(&values[done..done + len]);
            done += len;
        });
    }

    /// Calls `f(global index, length)` for every contiguous run, in row-major order.
    pub(crate) fn global_runs(&self, mut f: impl FnMut(usize, usize)) {
        if self.window.is_some() {
            return self.runs(&[], |global, _, len| f(global, len));
        }
        let own = Piece { local: self.ranges.clone(), ..self.clone() };
        let shape = self.shape.clone();
        own.runs(&shape, |global, _, len| f(global, len));
    }
}

/// One part of one dim.
struct Part {
    segment: String,
    expert: Option<usize>,
    size: usize,
    global: Range<usize>,
    local: Range<usize>,
}

/// The parts of every dim, and the local shape.
fn parts_of(spec: &ParamSpec, place: &Place) -> Result<(Vec<Vec<Part>>, Vec<usize>), Error> {
    let (mut parts, mut local_shape) = (Vec::new(), Vec::new());
    for (dim, &size) in spec.shape.iter().enumerate() {
        let slicing = spec.slicing.iter().find(|s| s.dim == dim);
        let mut list = Vec::new();
        let mut offset = 0;
        let Some(slicing) = slicing else {
            list.push(Part { segment: String::new(), expert: None, size, global: 0..size, local: 0..size });
            parts.push(list);
            local_shape.push(size);
            continue;
        };
        let (count, index) = (place.size(slicing.axis), place.coordinate(slicing.axis));
        for segment in &slicing.segments {
            if !slicing.pad {
                let what = format!("dim {dim} of {} {}", spec.name, segment.name);
                check_divides(what.trim_end(), segment.size, slicing.axis, place)?;
            }
            let chunk = segment.size.div_ceil(count);
            let start = (index * chunk).min(segment.size);
            let global = start..((index + 1) * chunk).min(segment.size);
            if slicing.axis == Axis::Ep {
                list.extend(global.clone().map(|expert| Part {
                    segment: segment.name.clone(),
                    expert: Some(expert),
                    size: 1,
                    global: 0..1,
                    local: expert - start..expert - start + 1,
                }));
            } else {
                let local = offset..offset + global.len();
                let (segment, size) = (segment.name.clone(), segment.size);
                list.push(Part { segment, expert: None, size, global, local });
            }
            offset += chunk;
        }
        parts.push(list);
        local_shape.push(offset);
    }
    Ok((parts, local_shape))
}

/// The local shape of a parameter on a rank.
///
/// # Errors
/// [`Error::Indivisible`] when a dim does not divide over its axis.
pub fn local_shape(spec: &ParamSpec, place: &Place) -> Result<Vec<usize>, Error> {
    Ok(parts_of(spec, place)?.1)
}

/// This rank's parts of all layout-free tensors of a parameter, in the order of the local tensor.
///
/// # Errors
/// [`Error::Indivisible`] when a dim does not divide over its axis.
pub fn pieces(spec: &ParamSpec, place: &Place) -> Result<Vec<Piece>, Error> {
    let (parts, _) = parts_of(spec, place)?;
    let mut combinations: Vec<Vec<&Part>> = vec![Vec::new()];
    for dim in &parts {
        combinations = combinations
            .iter()
            .flat_map(|head| {
                dim.iter().map(move |part| head.iter().copied().chain([part]).collect::<Vec<&Part>>())
            })
            .collect();
    }
    let (stem, leaf) = match spec.name.rsplit_once('.') {
        Some((stem, leaf)) => (format!("{stem}."), leaf),
        None => (String::new(), spec.name.as_str()),
    };
    let piece = |chosen: &Vec<&Part>| {
        let leaf = chosen.iter().map(|p| p.segment.as_str()).find(|s| !s.is_empty()).unwrap_or(leaf);
        let expert = chosen.iter().find_map(|p| p.expert);
        let name = match expert {
            Some(expert) => format!("{stem}{expert}.{leaf}"),
            None => format!("{stem}{leaf}"),
        };
        let skip = usize::from(expert.is_some());
        Piece {
            name,
            shape: chosen.iter().skip(skip).map(|p| p.size).collect(),
            ranges: chosen.iter().skip(skip).map(|p| p.global.clone()).collect(),
            local: chosen.iter().map(|p| p.local.clone()).collect(),
            window: None,
        }
    };
    Ok(combinations.iter().map(piece).collect())
}
