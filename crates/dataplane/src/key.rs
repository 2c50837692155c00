//! What names a queue, and a request of it, on whichever IOThread it is.

use rtvirtio_engine::Token;

/// The most virtqueues of a device.
pub const QUEUES_MAX: u16 = 64;

/// Names a queue while it is served: unique in the process at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueueKey(pub(crate) u32);

/// A request of a queue: the IOThread finds both again when it ends.
pub(crate) const fn token(key: QueueKey, head: u16) -> Token {
    Token((key.0 as u64) << 16 | head as u64)
}

/// The queue and the head that a token names.
pub(crate) const fn from_token(token: Token) -> (QueueKey, u16) {
    (QueueKey((token.0 >> 16) as u32), token.0 as u16)
}
