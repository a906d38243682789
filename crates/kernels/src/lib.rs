//! Tensors and arithmetic of one device
