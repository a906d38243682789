//! Router, balancing, experts and the mixture-of-experts layer
