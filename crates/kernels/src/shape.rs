//! Shapes of dense row-major tensors: up to four dims, the last one contiguous.

/// Most dims a tensor can have.
pub const MAX_DIMS: usize = 4;

/// Sizes of a tensor's dims, outermost first. The empty shape is a scalar.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    sizes: [usize; MAX_DIMS],
    count: u8,
}

impl Shape {
    /// Builds a shape from its sizes.
    ///
    /// # Panics
    /// When there are more than [`MAX_DIMS`] dims.
    pub fn new(sizes: &[usize]) -> Shape {
        assert!(sizes.len() <= MAX_DIMS, "{} dims, at most {MAX_DIMS}", sizes.len());
        let mut all = [1; MAX_DIMS];
        all[..sizes.len()].copy_from_slice(sizes);
        Shape { sizes: all, count: sizes.len() as u8 }
    }

    /// The sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.sizes[..self.count as usize]
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.dims().iter().product()
    }

    /// Whether the shape has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements of one row, i.e. of everything below the outermost dim (1 for a scalar).
    pub fn row_len(&self) -> usize {
        self.dims().iter().skip(1).product()
    }

    /// The same shape with another outermost size.
    ///
    /// # Panics
    /// For a scalar, which has no outermost dim.
    pub fn with_rows(mut self, rows: usize) -> Shape {
        assert!(self.count > 0, "a scalar has no rows");
        self.sizes[0] = rows;
        self
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(sizes: [usize; N]) -> Shape {
        Shape::new(&sizes)
    }
}

impl From<&[usize]> for Shape {
    fn from(sizes: &[usize]) -> Shape {
        Shape::new(sizes)
    }
}
