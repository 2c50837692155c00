//! What each block may hold: the verifier's memory of what was acknowledged.
//!
//! A queue has a range of blocks of its own, so no two queues race; within it a
//! request in flight has its blocks to itself. A block *may hold* what the last
//! acknowledged write left; after requests were abandoned in flight also what
//! these would have left, until a read tells; after a discard the old content or
//! zeroes.

use super::block::{Seen, Tag};

/// What a block may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Not known: nobody wrote it yet.
    Anything,
    /// Zeroes.
    Zeroes,
    /// The write of this generation.
    Generation(u64),
}

/// A block that holds what it may not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("block {block} holds {seen}, not {allowed:?}{}", durable(*.flushed))]
pub struct Violation {
    /// Which block.
    pub block: u64,
    /// What it holds.
    pub seen: Seen,
    /// What it may hold.
    pub allowed: Vec<Content>,
    /// Whether a flush had completed since it was last changed.
    pub flushed: bool,
}

const fn durable(flushed: bool) -> &'static str {
    if flushed { ", acknowledged and flushed" } else { "" }
}

/// What a request does to its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Read,
    Write,
    Zero,
    Discard,
    Flush,
}

/// A request in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pending {
    pub(super) change: Change,
    /// Within the part.
    pub(super) first: usize,
    pub(super) count: usize,
    /// Of a write; of a flush: the changes that were acknowledged before it.
    pub(super) number: u64,
}

#[derive(Debug)]
struct Block {
    allowed: Vec<Content>,
    busy: bool,
    /// The number of its last acknowledged change.
    changed: u64,
}

/// One queue's blocks.
#[derive(Debug)]
pub(super) struct Part {
    start: u64,
    seed: u64,
    blocks: Vec<Block>,
    generation: u64,
    changes: u64,
    flushed: u64,
}

impl Part {
    pub(super) fn new(start: u64, count: usize, seed: u64) -> Self {
        let block = || Block { allowed: vec![Content::Anything], busy: false, changed: 0 };
        let blocks = std::iter::repeat_with(block).take(count).collect();
        Self { start, seed, blocks, generation: 0, changes: 0, flushed: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// The number of its block `index` on the disk.
    pub(super) const fn number(&self, index: usize) -> u64 {
        self.start + index as u64
    }

    /// Claims blocks for a request; `None` if one of them is in flight.
    pub(super) fn begin(&mut self, change: Change, first: usize, count: usize) -> Option<Pending> {
        if change == Change::Flush {
            return Some(Pending { change, first: 0, count: 0, number: self.changes });
        }
        let blocks = &mut self.blocks[first..first + count];
        if blocks.iter().any(|b| b.busy) {
            return None;
        }
        blocks.iter_mut().for_each(|b| b.busy = true);
        self.generation += u64::from(change == Change::Write);
        Some(Pending { change, first, count, number: self.generation })
    }

    /// What a write stores in its `index`th block.
    pub(super) const fn tag(&self, write: &Pending, index: usize) -> Tag {
        let block = self.number(write.first + index);
        Tag { block, generation: write.number, seed: self.seed }
    }

    /// A request was acknowledged.
    pub(super) fn acknowledged(&mut self, request: &Pending) {
        if request.change == Change::Flush {
            self.flushed = self.flushed.max(request.number);
            return;
        }
        if request.change != Change::Read {
            self.changes += 1;
        }
        let changes = self.changes;
        for block in &mut self.blocks[request.first..request.first + request.count] {
            block.busy = false;
            match request.change {
                Change::Write => block.allowed = vec![Content::Generation(request.number)],
                Change::Zero => block.allowed = vec![Content::Zeroes],
                Change::Discard => add(&mut block.allowed, Content::Zeroes),
                Change::Read | Change::Flush => continue,
            }
            block.changed = changes;
        }
    }

    /// A request was in flight when the connection went: it may have been done or not.
    pub(super) fn abandoned(&mut self, request: &Pending) {
        for block in &mut self.blocks[request.first..request.first + request.count] {
            block.busy = false;
            match request.change {
                Change::Write => add(&mut block.allowed, Content::Generation(request.number)),
                Change::Zero | Change::Discard => add(&mut block.allowed, Content::Zeroes),
                Change::Read | Change::Flush => {}
            }
        }
    }

    /// Judges what a read brought. From then on it is what the block holds.
    pub(super) fn saw(&mut self, index: usize, seen: Seen) -> Result<(), Box<Violation>> {
        let number = self.number(index);
        let (seed, flushed) = (self.seed, self.flushed);
        let block = &mut self.blocks[index];
        let content = match seen {
            Seen::Zeroes => Some(Content::Zeroes),
            Seen::Tagged(tag) if tag.block == number && tag.seed == seed => {
                Some(Content::Generation(tag.generation))
            }
            // Another run's, or nobody's.
            Seen::Tagged(_) | Seen::Garbage => None,
        };
        if let Some(content) = content.filter(|c| block.allowed.contains(c)) {
            block.allowed.clear();
            block.allowed.push(content);
            return Ok(());
        }
        if block.allowed.contains(&Content::Anything) && !is_ours(seen, seed) {
            return Ok(());
        }
        Err(Box::new(Violation {
            block: number,
            seen,
            allowed: block.allowed.clone(),
            flushed: block.changed > 0 && block.changed <= flushed,
        }))
    }
}

/// Whether this run wrote it: then it is misplaced where nothing was written yet.
fn is_ours(seen: Seen, seed: u64) -> bool {
    matches!(seen, Seen::Tagged(tag) if tag.seed == seed)
}

fn add(allowed: &mut Vec<Content>, content: Content) {
    if !allowed.contains(&content) {
        allowed.push(content);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u64 = 5;

    fn seen(block: u64, generation: u64) -> Seen {
        Seen::Tagged(Tag { block, generation, seed: SEED })
    }

    fn written(part: &mut Part, first: usize) -> Pending {
        let write = part.begin(Change::Write, first, 1).unwrap();
        part.acknowledged(&write);
        write
    }

    #[test]
    fn acknowledged_write_must_be_there_and_nothing_else() {
        let mut part = Part::new(100, 4, SEED);
        written(&mut part, 1);
        written(&mut part, 1);
        assert_eq!(part.saw(1, seen(101, 2)), Ok(()));
        for wrong in [seen(101, 1), seen(102, 2), Seen::Zeroes, Seen::Garbage] {
            assert_eq!(part.saw(1, wrong).unwrap_err().block, 101);
        }
        let other_run = Seen::Tagged(Tag { block: 101, generation: 2, seed: 6 });
        assert!(part.saw(1, other_run).is_err());
    }

    #[test]
    fn abandoned_write_may_be_old_or_new_until_it_is_seen() {
        let mut part = Part::new(0, 1, SEED);
        written(&mut part, 0);
        let lost = part.begin(Change::Write, 0, 1).unwrap();
        part.abandoned(&lost);
        assert_eq!(part.saw(0, seen(0, 2)), Ok(()));
        assert!(part.saw(0, seen(0, 1)).is_err(), "it went back in time");
    }

    #[test]
    fn discard_leaves_old_content_or_zeroes() {
        let mut part = Part::new(0, 2, SEED);
        for block in 0..2 {
            written(&mut part, block);
        }
        let discard = part.begin(Change::Discard, 0, 2).unwrap();
        part.acknowledged(&discard);
        assert_eq!(part.saw(0, Seen::Zeroes), Ok(()));
        assert_eq!(part.saw(1, seen(1, 2)), Ok(()));
        assert!(part.saw(0, seen(0, 1)).is_err());
    }

    #[test]
    fn unwritten_block_may_hold_anything_but_this_run() {
        let mut part = Part::new(0, 1, SEED);
        assert_eq!(part.saw(0, Seen::Garbage), Ok(()));
        assert!(part.saw(0, seen(0, 1)).is_err());
    }

    #[test]
    fn loss_after_a_flush_is_told_apart() {
        let mut part = Part::new(0, 2, SEED);
        written(&mut part, 0);
        let flush = part.begin(Change::Flush, 0, 0).unwrap();
        written(&mut part, 1);
        part.acknowledged(&flush);
        assert!(part.saw(0, Seen::Zeroes).unwrap_err().flushed);
        assert!(!part.saw(1, Seen::Zeroes).unwrap_err().flushed);
    }

    #[test]
    fn blocks_in_flight_are_not_given_twice() {
        let mut part = Part::new(0, 4, SEED);
        let write = part.begin(Change::Write, 0, 3).unwrap();
        assert!(part.begin(Change::Read, 2, 2).is_none());
        part.acknowledged(&write);
        assert!(part.begin(Change::Read, 2, 2).is_some());
    }
}
