//! The description of one parameter: global shape, owner family, and which axes of the mesh cut which dims.
//! A fused parameter (q|k|v, gate|up) has segments along a dim; a rank's part is the concatenation of its even
//! chunk of each segment, so that names and values never depend on the layout. Which ranks hold replicas follows
//! from family and slicing alone; sizes are never looked at.

use plica_folding::axis::Axis;
use plica_folding::groups;

use crate::error::Error;
use crate::place::Place;

/// Handle of a parameter in its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub(crate) usize);

impl ParamId {
    /// The handle of what a rank declares as number `index`, from 0: also of another rank, for a file that all write.
    pub fn nth(index: usize) -> ParamId {
        ParamId(index)
    }

    /// Position in the order of declaration.
    pub fn index(self) -> usize {
        self.0
    }
}

/// Which mesh a parameter lives on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// TP x CP x DP x PP.
    Dense,
    /// ETP x EP x EDP x PP.
    Expert,
}

/// How the values start. Draws are a function of (seed, name of the layout-free tensor, index in it).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform in [-bound, bound).
    Uniform {
        /// Largest absolute value.
        bound: f64,
    },
    /// All 1 (weights of norms).
    Ones,
    /// All 0 (biases).
    Zeros,
}

/// One part of a fused dim, e.g. q of q|k|v.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Last component of the layout-free tensor's name; empty keeps the parameter's own.
    pub name: String,
    /// Global size along the dim.
    pub size: usize,
}

/// How one dim is cut over one axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slicing {
    /// The dim.
    pub dim: usize,
    /// The axis: TP for dense parameters, EP (dim 0: one tensor an expert) or ETP for experts.
    pub axis: Axis,
    /// Parts of the dim, each cut evenly; together they are the whole dim.
    pub segments: Vec<Segment>,
    /// Whether a size that does not divide is padded to the next multiple (vocabulary). Padded entries are zero
    /// and belong to no layout-free tensor.
    pub pad: bool,
}

impl Slicing {
    /// Cuts a dim of `size` that is not fused.
    pub fn even(dim: usize, axis: Axis, size: usize) -> Slicing {
        Slicing { dim, axis, segments: vec![Segment { name: String::new(), size }], pad: false }
    }

    /// Cuts a dim of `size`, padded to a multiple of the axis.
    pub fn padded(dim: usize, axis: Axis, size: usize) -> Slicing {
        Slicing { pad: true, ..Slicing::even(dim, axis, size) }
    }

    /// Cuts a fused dim; each `(name, size)` is a segment.
    pub fn fused(dim: usize, axis: Axis, segments: &[(&str, usize)]) -> Slicing {
        let segments = segments.iter().map(|(name, size)| Segment { name: (*name).into(), size: *size });
        Slicing { dim, axis, segments: segments.collect(), pad: false }
    }
}

/// The description of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Name, dotted, unique: `layers.3.attention.qkv`. Where a dim has named segments the last component is
    /// replaced by the segment's (`layers.3.attention.q`); where dim 0 is cut over EP the global expert id goes
    /// before it (`layers.3.moe.experts.17.gate`).
    pub name: String,
    /// Global shape.
    pub shape: Vec<usize>,
    /// Mesh that it lives on.
    pub family: Family,
    /// Cut dims, at most one slicing a dim.
    pub slicing: Vec<Slicing>,
    /// Whether weight decay applies (matrices).
    pub decay: bool,
    /// Initial values.
    pub init: Init,
    /// Whether this is a second copy, on another pipeline stage, of a parameter that an earlier stage declares
    /// under the same name (the head of tied tables). It starts with the same values, its gradient is summed with
    /// that of the first one, and it is neither counted in a norm nor written to a checkpoint.
    pub copy: bool,
}

impl ParamSpec {
    /// A dense parameter that is the same on every rank (norms, router).
    pub fn replicated(name: impl Into<String>, shape: &[usize], decay: bool, init: Init) -> ParamSpec {
        ParamSpec {
            name: name.into(),
            shape: shape.to_vec(),
            family: Family::Dense,
            slicing: Vec::new(),
            decay,
            init,
            copy: false,
        }
    }

    /// The same with a dim cut.
    pub fn cut(mut self, slicing: Slicing) -> ParamSpec {
        self.slicing.push(slicing);
        self
    }

    /// The same as the second copy of a parameter of an earlier stage.
    pub fn second_copy(mut self) -> ParamSpec {
        self.copy = true;
        self
    }

    /// The same as an expert parameter.
    pub fn expert(mut self) -> ParamSpec {
        self.family = Family::Expert;
        self
    }

    /// Number of elements of the whole parameter, padding not counted.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether an axis cuts a dim.
    pub fn is_cut_over(&self, axis: Axis) -> bool {
        self.slicing.iter().any(|s| s.axis == axis)
    }

    /// The ranks over which the gradient is a plain sum: dense and cut over TP -> DP x CP; dense and the same on
    /// all TP ranks (each saw its own tokens or heads) -> TP x DP x CP; expert -> EDP.
    pub fn reduce_family(&self) -> groups::Family {
        match self.family {
            Family::Expert => groups::Family::Edp,
            Family::Dense if self.is_cut_over(Axis::Tp) => groups::Family::DpCp,
            Family::Dense => groups::Family::TpDpCp,
        }
    }

    /// Whether this rank is the one that counts this part in a norm and writes it to a checkpoint: the first of
    /// the ranks that hold the same values.
    pub fn is_first_replica(&self, place: &Place) -> bool {
        let first = |axis| place.coordinate(axis) == 0;
        if self.copy {
            return false;
        }
        match self.family {
            Family::Dense => {
                first(Axis::Dp) && first(Axis::Cp) && (self.is_cut_over(Axis::Tp) || first(Axis::Tp))
            }
            Family::Expert => {
                first(Axis::Edp)
                    && [Axis::Etp, Axis::Ep].into_iter().all(|axis| self.is_cut_over(axis) || first(axis))
            }
        }
    }

    fn check(&self) {
        for (i, slicing) in self.slicing.iter().enumerate() {
            let size: usize = slicing.segments.iter().map(|s| s.size).sum();
            assert_eq!(
                Some(&size),
                self.shape.get(slicing.dim),
                "{}: segments of dim {}",
                self.name,
                slicing.dim
            );
            assert!(self.slicing[..i].iter().all(|s| s.dim != slicing.dim), "{}: a dim cut twice", self.name);
            let fits = match slicing.axis {
                Axis::Tp => self.family == Family::Dense,
                Axis::Etp => self.family == Family::Expert,
                Axis::Ep => self.family == Family::Expert && slicing.dim == 0,
                _ => false,
            };
            assert!(fits, "{}: a {:?} parameter is not cut over {}", self.name, self.family, slicing.axis);
        }
        let named = self.slicing.iter().filter(|s| s.segments.iter().any(|g| !g.name.is_empty()));
        assert!(named.count() <= 1, "{}: one fused dim at most", self.name);
    }
}

/// Collects the descriptions while layers are built.
#[derive(Clone, Debug, Default)]
pub struct ParamSpecs {
    specs: Vec<ParamSpec>,
}

impl ParamSpecs {
    /// None yet.
    pub fn new() -> ParamSpecs {
        ParamSpecs::default()
    }

    /// Declares a parameter.
    ///
    /// # Panics
    /// When the name is taken or the slicing does not fit the shape or the family.
    pub fn add(&mut self, spec: ParamSpec) -> ParamId {
        spec.check();
        assert!(self.specs.iter().all(|s| s.name != spec.name), "two parameters named {}", spec.name);
        self.specs.push(spec);
        ParamId(self.specs.len() - 1)
    }

    /// The descriptions in the order of declaration.
    pub fn list(&self) -> &[ParamSpec] {
        &self.specs
    }
}

/// Refuses what does not divide over an axis, with both numbers.
///
/// # Errors
/// [`Error::Indivisible`].
pub fn check_divides(what: impl Into<String>, count: usize, axis: Axis, place: &Place) -> Result<(), Error> {
    let parts = place.size(axis);
    if count.is_multiple_of(parts) {
        return Ok(());
    }
    Err(Error::Indivisible { what: what.into(), count, axis, parts })
}
