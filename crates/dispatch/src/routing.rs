//! A routing: for each token of a rank its k (expert, weight) pairs. A slot of -1 is empty: a padding token,
//! a pair that capacity dropped, or an unused choice; it sends nothing and its weight receives no gradient.
//! Optionally with padding: zero rows that fill every (scope, expert) chunk to a fixed size.

use plica_kernels::{Real, Tensor};

use crate::error::DispatchError;

/// Id of an empty slot.
pub const EMPTY_SLOT: i32 = -1;

/// Zero rows that a rank adds behind each scope's rows of each expert, so that their number is fixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Padding {
    /// First token of each scope of this rank, and the number of tokens: one more than scopes, never falling.
    pub boundaries: Vec<usize>,
    /// Rows of each (scope, expert) chunk, padding included, scope-major.
    pub rows_se: Vec<usize>,
}

impl Padding {
    /// Every chunk of a scope gets that scope's capacity, for every expert.
    ///
    /// # Panics
    /// When there is not one capacity a scope.
    pub fn to_capacity(boundaries: &[usize], capacities: &[usize], experts: usize) -> Padding {
        assert_eq!(boundaries.len(), capacities.len() + 1, "one capacity a scope");
        let rows_se = capacities.iter().flat_map(|&c| std::iter::repeat_n(c, experts)).collect();
        Padding { boundaries: boundaries.to_vec(), rows_se }
    }

    /// Number of scopes.
    pub fn scopes(&self) -> usize {
        self.boundaries.len() - 1
    }
}

/// Where the tokens of one rank go, with what weight.
#[derive(Clone, Debug)]
pub struct Routing<A: Real> {
    /// Number of experts of the layer.
    pub experts: usize,
    /// Expert of each slot, [t, k]; -1 = empty.
    pub expert_ids_tk: Tensor<i32>,
    /// Weight of each slot, [t, k].
    pub weights_tk: Tensor<A>,
    /// Zero rows that fill each expert's chunk, if wanted.
    pub padding: Option<Padding>,
}

impl<A: Real> Routing<A> {
    /// A routing without padding.
    ///
    /// # Panics
    /// When the two tensors are not of one [t, k] shape.
    pub fn new(experts: usize, expert_ids_tk: Tensor<i32>, weights_tk: Tensor<A>) -> Routing<A> {
        let routing = Routing { experts, expert_ids_tk, weights_tk, padding: None };
        routing.assert_shapes();
        routing
    }

    /// The same routing with padding.
    pub fn with_padding(mut self, padding: Padding) -> Routing<A> {
        self.padding = Some(padding);
        self
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.expert_ids_tk.dim(0)
    }

    /// Slots of a token.
    pub fn k(&self) -> usize {
        self.expert_ids_tk.dim(1)
    }

    /// Slots that name each expert; empty ones count nowhere.
    ///
    /// # Errors
    /// When an id is not an expert.
    pub fn counts_e(&self) -> Result<Vec<usize>, DispatchError> {
        counts(&self.expert_ids_tk.to_vec(), self.k(), self.experts)
    }

    pub(crate) fn assert_shapes(&self) {
        assert_eq!(self.expert_ids_tk.dims().len(), 2, "expert ids are [t, k]");
        assert_eq!(self.expert_ids_tk.shape(), self.weights_tk.shape(), "ids and weights of one shape");
    }
}

/// Slots that name each expert.
///
/// # Errors
/// When an id is neither -1 nor below `experts`, or a token names an expert twice.
pub fn counts(expert_ids_tk: &[i32], k: usize, experts: usize) -> Result<Vec<usize>, DispatchError> {
    let mut counts_e = vec![0; experts];
    for (token, ids) in expert_ids_tk.chunks_exact(k.max(1)).enumerate() {
        for (slot, &id) in ids.iter().enumerate() {
            if id == EMPTY_SLOT {
                continue;
            }
            if id < 0 || id as usize >= experts {
                return Err(DispatchError::ExpertId { token, slot, id, experts });
            }
            if let Some(first) = ids[..slot].iter().position(|&earlier| earlier == id) {
                return Err(DispatchError::RepeatedExpert { token, id, first, second: slot });
            }
            counts_e[id as usize] += 1;
        }
    }
    Ok(counts_e)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_skip_empty_slots_and_refuse_nonsense() {
        assert_eq!(counts(&[0, 2, -1, -1, 2, 1], 2, 4).unwrap(), [1, 1, 2, 0]);
        assert_eq!(counts(&[], 2, 3).unwrap(), [0, 0, 0]);
        let text = counts(&[0, 1, 1, 4], 2, 4).unwrap_err().to_string();
        assert!(text.contains("token 1, slot 1: expert id 4 of 4 experts"), "{text}");
        assert!(counts(&[-2], 1, 4).unwrap_err().to_string().contains("expert id -2"));
        let text = counts(&[0, 1, 3, 3], 2, 4).unwrap_err().to_string();
        assert!(text.contains("token 1 lists expert 3 twice (slots 0 and 1)"), "{text}");
    }
}
