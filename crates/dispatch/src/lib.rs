//! Tokens to experts and back
