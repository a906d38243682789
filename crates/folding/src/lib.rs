//! Who talks to whom: both meshes of a layout as pure integers
