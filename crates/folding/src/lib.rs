//! Who talks to whom: both meshes of a layout as pure integers.
//!
//! A [`Layout`] factors the same ranks twice, TP·CP·DP·PP for attention and ETP·EP·EDP·PP for experts. From it
//! follow coordinates, groups, owners and node crossings; nothing here knows a device, a tensor or a message.

pub mod axis;
pub mod check;
pub mod error;
pub mod grid;
pub mod groups;
pub mod layout;
pub mod owner;
pub mod place;
pub mod search;

pub use axis::{Axis, MeshKind, Order};
pub use check::{ModelDims, padded_vocab};
pub use error::LayoutError;
pub use groups::Family;
pub use layout::{Coordinates, Layout, LayoutSpec, MAX_WORLD};
pub use owner::{even_part_of, even_range, zigzag_chunks};
pub use place::{Placement, node_count};
pub use search::{Limits, enumerate, nearest_valid};
