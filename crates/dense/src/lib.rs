//! The dense core: tensor-parallel layers, attention, blocks, loss, optimizer
