//! What the loop counts on of the kernel.

use rtvirtio_engine::testing::has_io_uring;
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::mailbox::mailbox;

/// The kernel keeps them, and says so where nobody looks who waits for completions alone.
#[test]
fn completions_for_which_there_is_no_room_are_reaped_though_nothing_wakes_the_thread() {
    if !has_io_uring() {
        return;
    }
    let (sender, mail) = mailbox().unwrap();
    let poller = Poller::new(Polling::default(), None);
    let mut thread = IoThread::new(mail, sender, Arc::default(), poller).unwrap();
    // No smaller than its submission queue: the kernel makes no others.
    thread.ring = ring(ENTRIES).unwrap();
    let all = 2 * ENTRIES as usize;
    for _ in 0..all {
        thread.push(&opcode::Nop::new().build().user_data(CANCELLED));
    }
    thread.submit();
    assert!(thread.ring.submission().cq_overflow(), "there was room for all");
    let mut reaped = 0;
    while reaped < all {
        assert!(thread.has_work(), "it would wait with {reaped} of {all} reaped");
        thread.reap();
        reaped += thread.entries.len();
        thread.submit();
    }
    assert!(!thread.has_work());
}

#[test]
fn polling_time_grows_to_the_maximum_and_one_late_event_halves_it() {
    let polling = Polling::default();
    let next = |poll, blocked| polling.adjust(poll, 32_768, blocked);
    let grown: Vec<u64> =
        std::iter::successors(Some(0), |&poll| Some(next(poll, poll + 1))).take(6).collect();
    assert_eq!(grown, [0, 4_000, 8_000, 16_000, 32_000, 32_768]);
    assert_eq!([next(32_768, 32_000), next(32_768, 32_769), next(0, 40_000)], [32_768, 16_384, 0]);
    let qemu = Polling { shrink: 0, ..polling };
    assert_eq!(qemu.adjust(32_768, 32_768, 40_000), 0);
}

#[test]
fn poll_that_ends_for_want_of_room_says_the_same_as_one_of_a_file_that_always_ends() {
    if !has_io_uring() {
        return;
    }
    let mut ring: IoUring = IoUring::builder().setup_cqsize(4).build(2).unwrap();
    let push = |ring: &mut IoUring, fd: &rustix::fd::OwnedFd| {
        let poll = opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), libc::POLLIN as u32);
        let poll = poll.multi(true).build().user_data(7);
        // SAFETY: a poll refers to no memory.
        unsafe { ring.submission().push(&poll).unwrap() };
        ring.submit().unwrap();
    };
    let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    push(&mut ring, &kick);
    for _ in 0..16 {
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        // Runs what the kernel has put off; what it completes is not reaped.
        let _ = rustix::io::write(&kick, &0u64.to_ne_bytes());
    }
    let mut last = None;
    loop {
        // What did not fit comes when there is room.
        let _ = ring.submitter().submit_with_args(
            1,
            &types::SubmitArgs::new().timespec(&types::Timespec::from(KICKLESS_POLL_INTERVAL)),
        );
        let mut any = false;
        for entry in ring.completion() {
            any = true;
            last = Some((entry.result(), cqueue::more(entry.flags())));
        }
        if !any {
            break;
        }
    }
    assert_eq!(last, Some((i32::from(libc::POLLIN), false)));

    let file = tempfile::tempfile().unwrap().into();
    push(&mut ring, &file);
    let entry = ring.completion().next().unwrap();
    assert_eq!((entry.result(), cqueue::more(entry.flags())), (i32::from(libc::POLLIN), false));
}
