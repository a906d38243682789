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
            if family == Family::World {
                groups.insert(family, world.clone());
            } else if let Some(group) = world.partition(family.name(), &layout.groups(family))? {
                groups.insert(family, group);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::{Purpose, Reduce};
    use crate::launch::{BoxError, LaunchOptions, run_ranks};
    use plica_folding::LayoutSpec;
    use plica_kernels::{Category, Tensor};

    /// Powers of two by rank: the sum over a group names its members.
    #[test]
    fn every_family_sums_over_its_own_members() {
        let specs = [
            LayoutSpec { world: 8, tp: 2, ep: 4, etp: Some(1), ..LayoutSpec::default() },
            LayoutSpec { world: 8, tp: 2, cp: 2, ep: 2, etp: Some(2), ..LayoutSpec::default() },
            LayoutSpec {
                world: 8,
                tp: 1,
                pp: 4,
                ep: 2,
                order: "cp-tp-ep-dp-pp".into(),
                ..LayoutSpec::default()
            },
        ];
        for spec in specs {
            let layout = Layout::new(&spec).expect("a valid layout");
            run_ranks(spec.world, LaunchOptions::default(), |ctx| -> Result<(), BoxError> {
                let mesh = Mesh::new(&ctx.world, layout.clone())?;
                assert_eq!(ctx.recorder.operations(), 0, "a mesh sends nothing");
                for family in Family::ALL {
                    let members = layout.group_of(family, ctx.rank);
                    let Some(group) = mesh.find(family) else {
                        assert!(members.is_empty() && family == Family::Embedding);
                        continue;
                    };
                    assert_eq!((group.global_ranks(), members[group.rank()]), (&members[..], ctx.rank));
                    let x = Tensor::from_slice(&ctx.device, [1], &[1i64 << ctx.rank], Category::Gradient);
                    let sum = group.all_reduce(Purpose::ReduceGradients, &x, Reduce::Sum)?.item();
                    assert_eq!(sum, members.iter().map(|m| 1i64 << m).sum::<i64>(), "{family:?}");
                }
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{spec:?}: {error}"));
        }
    }

    #[test]
    fn a_layout_of_another_size_is_refused() {
        let layout = Layout::new(&LayoutSpec { world: 4, ..LayoutSpec::default() }).expect("valid");
        let error =
            run_ranks(2, LaunchOptions::default(), |ctx| Mesh::new(&ctx.world, layout.clone()).map(drop))
                .expect_err("refused");
        assert!(error.to_string().contains("for 4 ranks, 2 are running"), "{error}");
    }

    #[test]
    fn one_rank_needs_no_threads() {
        let mesh = Mesh::single(&Device::cpu(1));
        assert!(Family::ALL.iter().all(|&f| mesh.group(f).is_single()));
        assert_eq!((mesh.rank(), mesh.layout().world()), (0, 1));
    }
}
