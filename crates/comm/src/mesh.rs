//! A layout's groups as communicators, for one rank: made once from the world group, handed down by reference.
//! Creating them sends nothing; names and members come from the layout, so all ranks agree.

use std::collections::BTreeMap;

use plica_folding::{Coordinates, Family, Layout};
use plica_kernels::Device;

use crate::error::CommError;
use crate::group::Group;
use crate::launch::RankContext;

/// All groups that one rank belongs to.
#[derive(Clone)]
pub struct Mesh {
    layout: Layout,
    rank: usize,
    coordinates: Coordinates,
    groups: BTreeMap<Family, Group>,
}

macro_rules! shorthand {
    ($($(#[$doc:meta])* $name:ident => $family:ident;)*) => {$(
        $(#[$doc])*
        pub fn $name(&self) -> &Group {
            self.group(Family::$family)
        }
    )*};
}

impl Mesh {
    /// The groups of the calling rank of `world` under `layout`.
    ///
    /// # Errors
    /// When the layout is for another number of ranks.
    pub fn new(world: &Group, layout: Layout) -> Result<Mesh, CommError> {
        let rank = world.rank();
        if layout.world() != world.size() {
            return Err(CommError::Request {
                rank,
                group: world.name().to_string(),
                operation: "mesh",
                text: format!(
                    "the layout is for {} ranks, {} are running: start as many as the layout has",
                    layout.world(),
                    world.size()
                ),
            });
        }
        let mut groups = BTreeMap::new();
        for family in Family::ALL {
            let members = layout.group_of(family, rank);
            if family == Family::World {
                groups.insert(family, world.clone());
            } else if !members.is_empty() {
                groups.insert(family, world.subgroup(family.name(), &members)?);
            }
        }
        Ok(Mesh { coordinates: layout.coordinates(rank), layout, rank, groups })
    }

    /// The mesh of one rank, without other threads.
    pub fn single(device: &Device) -> Mesh {
        let context = RankContext::single(device.clone());
        Mesh::new(&context.world, Layout::one()).expect("one rank fits the layout of one rank")
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// World rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Coordinates in both meshes.
    pub fn coordinates(&self) -> Coordinates {
        self.coordinates
    }

    /// The rank's group of a family, if it has one: a middle stage has no [`Family::Embedding`].
    pub fn find(&self, family: Family) -> Option<&Group> {
        self.groups.get(&family)
    }

    /// The rank's group of a family.
    ///
    /// # Panics
    /// For [`Family::Embedding`] on a middle stage; see [`Mesh::find`].
    pub fn group(&self, family: Family) -> &Group {
        self.find(family).unwrap_or_else(|| panic!("rank {} is in no group of {}", self.rank, family.name()))
    }

    shorthand! {
        /// Tensor parallelism of dense layers.
        tp => Tp;
        /// Context parallelism.
        cp => Cp;
        /// Data parallelism.
        dp => Dp;
        /// Pipeline stages.
        pp => Pp;
        /// Replicas of a dense parameter shard.
        dp_cp => DpCp;
        /// One sequence, all heads and chunks.
        tp_cp => TpCp;
        /// A whole stage, attention mesh.
        tp_dp_cp => TpDpCp;
        /// Tensor parallelism inside an expert.
        etp => Etp;
        /// Token exchange between experts.
        ep => Ep;
        /// Replicas of an expert shard.
        edp => Edp;
        /// Token exchange with expert tensor parallelism; position = `ep · ETP + etp`.
        etp_ep => EtpEp;
        /// All ranks.
        world => World;
    }
}
