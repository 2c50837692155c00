//! A slot in memory that two processes share, of which one is killed.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use rtvirtio_completion::{NotPending, Slot, Wakes};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const PAGE: usize = 4096;
/// Far more than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// A page of a memfd, with slots at its begin: zeroes are free ones.
struct Page(NonNull<Slot<true>>);

impl Page {
    fn new() -> Self {
        let memory = memfd_create("slots", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, PAGE as u64).unwrap();
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let page = unsafe { mmap(std::ptr::null_mut(), PAGE, both, MapFlags::SHARED, &memory, 0) };
        Self(NonNull::new(page.unwrap().cast()).unwrap())
    }

    fn slot(&self) -> &Slot<true> {
        // SAFETY: the mapping is as long as this value, aligned, and zeroes are a slot.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: nothing refers to it any more.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), PAGE) };
    }
}

/// A child process, killed at the latest when the value goes.
struct Child(libc::pid_t);

impl Child {
    /// `act` may allocate nothing and take no lock: other threads of this process had some.
    fn fork(act: impl FnOnce()) -> Self {
        // SAFETY: the child only does what is asked of `act`, and leaves.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            act();
            // SAFETY: no destructor and no handler runs.
            unsafe { libc::_exit(0) };
        }
        Self(pid)
    }

    /// Until the child has nothing to do but to wait: it sleeps in the kernel.
    fn is_asleep(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0)).unwrap();
        stat.rsplit(')').next().unwrap().trim_start().starts_with('S')
    }

    fn kill(self) {}
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: the child is this process's own, and is not waited for elsewhere.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        let mut status = 0;
        // SAFETY: `status` is there until the call returns.
        unsafe { libc::waitpid(self.0, &raw mut status, 0) };
    }
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "it does not come about");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn completion_goes_from_one_process_to_another() {
    let page = Page::new();
    let slot = page.slot();
    let ticket = slot.submit().unwrap();
    let child = Child::fork(|| {
        std::thread::sleep(Duration::from_millis(20));
        let _ = Wakes::default().complete(slot, ticket, -77);
    });
    assert_eq!(slot.wait(ticket, Some(PATIENCE)), Some(-77));
    child.kill();
}

#[test]
fn dead_waiter_does_not_hold_up_the_completer() {
    let page = Page::new();
    let slot = page.slot();
    for _ in 0..10 {
        let ticket = slot.submit().unwrap();
        let child = Child::fork(|| {
            let _ = slot.wait(ticket, None);
        });
        wait_until(|| child.is_asleep());
        child.kill();
        let began = Instant::now();
        let mut wakes = Wakes::default();
        assert_eq!(wakes.complete(slot, ticket, 1), Ok(()));
        wakes.issue();
        assert!(began.elapsed() < Duration::from_secs(20));
        // Its slot is free for another one, and what comes late changes nothing.
        slot.reclaim();
        assert_eq!(wakes.complete(slot, ticket, 2), Err(NotPending));
        let next = slot.submit().unwrap();
        assert_eq!(wakes.complete(slot, ticket, 3), Err(NotPending));
        assert_eq!(slot.take(next), None);
        slot.reclaim();
    }
}

#[test]
fn dead_completer_is_given_up() {
    let page = Page::new();
    let slot = page.slot();
    let ticket = slot.submit().unwrap();
    let child = Child::fork(|| {
        std::thread::sleep(PATIENCE);
        let _ = Wakes::default().complete(slot, ticket, 1);
    });
    child.kill();
    assert_eq!(slot.wait(ticket, Some(Duration::from_millis(20))), None);
    slot.reclaim();
    let next = slot.submit().unwrap();
    let mut wakes = Wakes::default();
    assert_eq!(wakes.complete(slot, ticket, 1), Err(NotPending));
    assert_eq!(wakes.complete(slot, next, 2), Ok(()));
    assert_eq!(slot.wait(next, None), Some(2));
}

/// Killed at any moment of a round trip, over and over: the other side goes on.
#[test]
fn peer_that_is_killed_at_any_time_leaves_a_slot_that_works() {
    let page = Page::new();
    let slot = page.slot();
    for round in 0..100_u64 {
        let child = Child::fork(|| {
            let mut result = 0;
            loop {
                let Some(ticket) = slot.submit() else { return };
                result += 1;
                let _ = Wakes::default().complete(slot, ticket, result);
                let _ = slot.take(ticket);
            }
        });
        std::thread::sleep(Duration::from_micros(50 * (round % 20)));
        child.kill();
        slot.reclaim();
        let ticket = slot.submit().unwrap();
        assert_eq!(Wakes::default().complete(slot, ticket, 5), Ok(()));
        assert_eq!(slot.wait(ticket, None), Some(5));
    }
}
