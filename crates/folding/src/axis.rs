//! The axes of both meshes and the order string that lays them over the ranks.
//!
//! A layout factors the same `G` ranks twice: the attention mesh TP x CP x DP x PP and the expert mesh
//! ETP x EP x EDP x PP (MoE Parallel Folding, arXiv:2504.14960, section 3). One order string such as
//! `tp-cp-ep-dp-pp` serves both: the leftmost axis varies fastest from rank to rank. The attention mesh skips
//! `ep`; in the expert mesh `tp` means ETP, `dp` means EDP, and `cp` is skipped.

use std::fmt;
use std::str::FromStr;

use crate::error::LayoutError;

/// One axis of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Tensor parallelism of the dense layers.
    Tp,
    /// Context parallelism: chunks of the sequence.
    Cp,
    /// Data parallelism of the dense layers.
    Dp,
    /// Pipeline stages; shared by both meshes.
    Pp,
    /// Tensor parallelism inside an expert.
    Etp,
    /// Expert parallelism: experts spread over ranks.
    Ep,
    /// Data parallelism of the experts: replicas of the same expert shard.
    Edp,
}

impl Axis {
    /// Every axis, attention mesh first.
    pub const ALL: [Axis; 7] = [Axis::Tp, Axis::Cp, Axis::Dp, Axis::Pp, Axis::Etp, Axis::Ep, Axis::Edp];

    /// The tokens of an order string, in the default order.
    pub const TOKENS: [Axis; 5] = [Axis::Tp, Axis::Cp, Axis::Ep, Axis::Dp, Axis::Pp];

    /// Lower-case name, as in order strings and settings.
    pub fn token(self) -> &'static str {
        match self {
            Axis::Tp => "tp",
            Axis::Cp => "cp",
            Axis::Dp => "dp",
            Axis::Pp => "pp",
            Axis::Etp => "etp",
            Axis::Ep => "ep",
            Axis::Edp => "edp",
        }
    }

    /// Upper-case name, as in equations.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Tp => "TP",
            Axis::Cp => "CP",
            Axis::Dp => "DP",
            Axis::Pp => "PP",
            Axis::Etp => "ETP",
            Axis::Ep => "EP",
            Axis::Edp => "EDP",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Which of the two factorisations of the ranks is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MeshKind {
    /// TP x CP x DP x PP.
    Attention,
    /// ETP x EP x EDP x PP.
    Expert,
}

impl MeshKind {
    /// The axis that an order token stands for in this mesh, or `None` where the mesh skips it.
    pub fn axis_of(self, token: Axis) -> Option<Axis> {
        match (self, token) {
            (MeshKind::Attention, Axis::Tp | Axis::Cp | Axis::Dp | Axis::Pp) => Some(token),
            (MeshKind::Expert, Axis::Tp) => Some(Axis::Etp),
            (MeshKind::Expert, Axis::Ep | Axis::Pp) => Some(token),
            (MeshKind::Expert, Axis::Dp) => Some(Axis::Edp),
            _ => None,
        }
    }
}

impl fmt::Display for MeshKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            MeshKind::Attention => "attention",
            MeshKind::Expert => "expert",
        })
    }
}

/// A parsed order string: distinct tokens out of `tp cp ep dp pp`, fastest-varying first.
///
/// It may leave out tokens; a layout accepts that where the axes that they stand for have size 1.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Order {
    tokens: Vec<Axis>,
}

impl Order {
    /// The tokens as written, fastest-varying first.
    pub fn tokens(&self) -> &[Axis] {
        &self.tokens
    }

    /// Whether the pipeline axis is written last, so that each stage is one contiguous block of ranks.
    pub fn ends_in_pp(&self) -> bool {
        self.tokens.last() == Some(&Axis::Pp)
    }

    /// The same order with `pp` moved to (or added at) the end.
    pub fn with_pp_last(&self) -> Order {
        let mut tokens: Vec<Axis> = self.tokens.iter().copied().filter(|&t| t != Axis::Pp).collect();
        tokens.push(Axis::Pp);
        Order { tokens }
    }

    /// All five tokens: those written, then the missing ones in default order.
    pub fn completed(&self) -> Order {
        let mut tokens = self.tokens.clone();
        tokens.extend(Axis::TOKENS.into_iter().filter(|t| !self.tokens.contains(t)));
        Order { tokens }
    }
}

impl Default for Order {
    fn default() -> Self {
        Order { tokens: Axis::TOKENS.to_vec() }
    }
}

impl FromStr for Order {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        let mut tokens = Vec::with_capacity(Axis::TOKENS.len());
        for word in text.split('-') {
            let Some(token) = Axis::TOKENS.into_iter().find(|t| t.token().eq_ignore_ascii_case(word)) else {
                return Err(LayoutError::UnknownToken { token: word.to_string(), order: text.to_string() });
            };
            if tokens.contains(&token) {
                return Err(LayoutError::DuplicateToken { token: token.token(), order: text.to_string() });
            }
            tokens.push(token);
        }
        Ok(Order { tokens })
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<&str> = self.tokens.iter().map(|t| t.token()).collect();
        f.pad(&words.join("-"))
    }
}
