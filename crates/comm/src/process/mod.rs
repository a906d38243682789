//! Ranks as processes. A [`Transport`] moves bytes between them; it knows nothing of groups and tensors.

pub mod transport;

pub use transport::{Landing, MESSAGE_BYTES, ReceiveBytes, SendBytes, TransferId, Transport, TransportError};
