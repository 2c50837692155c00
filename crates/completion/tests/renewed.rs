//! What a forked child does to its tokens, which may be in the middle of an allocation of its parent's.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use rtvirtio_completion::Tokens;

thread_local! {
    /// Allocations of this thread.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: the system's allocator does all of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: by the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: by the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn tokens_are_renewed_without_an_allocation() {
    let tokens = Tokens::apart().unwrap();
    let before = ALLOCATIONS.with(Cell::get);
    assert!(before > 0, "they are counted");
    let is_renewed = tokens.renew();
    assert_eq!(ALLOCATIONS.with(Cell::get), before);
    assert!(is_renewed);
}
