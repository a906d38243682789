//! The integration tests, one module a theme.
