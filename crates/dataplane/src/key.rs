//! What names a queue, and a request of it, on whichever IOThread it is.

use std::num::NonZeroU64;

use rtvirtio_engine::Token;

/// The most virtqueues of a device.
pub const QUEUES_MAX: u16 = 64;

/// Width of a [`TableKey`]: for as many queues as a process may have descriptors (Linux, `fs.nr_open` as it is by default), of
/// which each needs some.
const TABLE_BITS: u32 = 20;

/// Names a queue, and no other one in the life of its pool, so that a command for a queue that has stopped finds none.
///
/// One word, for an atomic to hold ([`crate::IoThreadStats`]): its place in tables in the lower 20 bits, above them how many queues
/// the pool had started. These 44 bits last for five years of one every 10 µs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueueKey(NonZeroU64);

impl QueueKey {
    /// Of the queue that is started as number `started`, from 1. `None`: there is no number or no place left.
    pub(crate) fn new(started: u64, table: TableKey) -> Option<Self> {
        let fits = started >> (u64::BITS - TABLE_BITS) == 0 && table.0 >> TABLE_BITS == 0;
        let key = NonZeroU64::new(started << TABLE_BITS | u64::from(table.0));
        key.filter(|_| fits).map(Self)
    }

    /// Its place in tables.
    pub(crate) const fn table(self) -> TableKey {
        TableKey((self.0.get() & ((1 << TABLE_BITS) - 1)) as u32)
    }

    /// As a number, which is not 0.
    pub(crate) const fn get(self) -> u64 {
        self.0.get()
    }

    /// Of [`Self::get`]; `None`: 0.
    pub(crate) fn from_number(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }
}

/// A queue's place in the tables of IOThreads and schedules, which is small. Another queue has it once this one has stopped: it
/// is for those who have the queue, and for what is in flight, for which a stop waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TableKey(pub(crate) u32);

/// A request of a queue: the IOThread finds both again when it ends. The queue does not stop before, so its [`TableKey`] is
/// enough, and there is room for it: of a token the upper 16 bits are clear, and the lower 16 are the head.
pub(crate) const fn token(key: QueueKey, head: u16) -> Token {
    Token((key.table().0 as u64) << 16 | head as u64)
}

/// The queue and the head that a token names.
pub(crate) const fn from_token(token: Token) -> (TableKey, u16) {
    (TableKey((token.0 >> 16) as u32), token.0 as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_and_token_hold_all_that_they_name() {
        let (number, table) = ((1 << 44) - 1, (1 << 20) - 1);
        let last = QueueKey::new(number, TableKey(table)).unwrap();
        assert_eq!((last.get(), last.table()), (u64::MAX, TableKey(table)));
        assert_eq!(QueueKey::from_number(last.get()), Some(last));
        assert_eq!(QueueKey::new(number + 1, TableKey(0)), None);
        assert_eq!(QueueKey::new(1, TableKey(table + 1)), None);
        let token = token(last, u16::MAX);
        assert_eq!((token.0 >> 48, from_token(token)), (0, (TableKey(table), u16::MAX)));
    }
}
