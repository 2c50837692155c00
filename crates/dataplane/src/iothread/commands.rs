//! An IOThread's rings for commands, for engines that need one: at most one whose devices interrupt,
//! and one whose devices are polled, made when the first queue comes that needs it.
//!
//! The thread waits at its own ring, which polls the descriptor of the first while something is in
//! flight there. Of the second nobody hears: as long as something is in flight there the thread looks,
//! and does not sleep.

use std::os::fd::AsRawFd;

use io_uring::squeue::{Entry128, SubmissionQueue};
use io_uring::{opcode, squeue, types};
use rtvirtio_engine::{CommandRing, Commands};

use super::{COMMANDS, COMPLETIONS, ENTRIES};

/// The rings that there are.
#[derive(Default)]
pub(super) struct Rings {
    interrupted: Option<CommandRing>,
    polled: Option<CommandRing>,
    /// Whether the thread's own ring listens to the first.
    is_listening: bool,
}

impl Rings {
    const fn place(&mut self, commands: Commands) -> &mut Option<CommandRing> {
        match commands {
            Commands::Interrupt => &mut self.interrupted,
            Commands::Polled => &mut self.polled,
        }
    }

    fn all(&mut self) -> impl Iterator<Item = &mut CommandRing> {
        self.interrupted.iter_mut().chain(&mut self.polled)
    }

    /// Makes the ring if there is none. Without it the engine's requests fail: it has had one of the
    /// kind when it was opened, so the system has no memory or descriptor left.
    pub(super) fn need(&mut self, commands: Commands) {
        let place = self.place(commands);
        if place.is_none() {
            *place = CommandRing::new(commands, ENTRIES, COMPLETIONS).ok();
        }
    }

    pub(super) fn submission(
        &mut self,
        commands: Commands,
    ) -> Option<SubmissionQueue<'_, Entry128>> {
        self.place(commands).as_mut().map(CommandRing::submission)
    }

    /// Submits, and has the kernel say what has ended.
    pub(super) fn enter(&mut self) {
        self.all().for_each(CommandRing::enter);
    }

    pub(super) fn is_submitted(&mut self) -> bool {
        self.all().all(CommandRing::is_submitted)
    }

    /// Whether something has ended.
    pub(super) fn has_ended(&mut self) -> bool {
        self.all().any(CommandRing::has_ended)
    }

    /// Whether something is in flight of which nobody hears.
    pub(super) fn must_be_polled(&self) -> bool {
        self.polled.as_ref().is_some_and(CommandRing::must_be_polled)
    }

    /// Whether the thread may wait: all is submitted, and it will hear of all ends.
    pub(super) fn may_sleep(&mut self) -> bool {
        self.is_submitted() && !self.must_be_polled()
    }

    /// The next result.
    pub(super) fn take(&mut self) -> Option<(u64, i32)> {
        self.all().find_map(CommandRing::take)
    }

    /// What the thread's own ring needs to hear of the next end, before the thread sleeps. The kernel
    /// ends such a poll when it has told of one (io_uring/poll.c: a ring that polls a ring).
    pub(super) fn listen(&mut self) -> Option<squeue::Entry> {
        let ring = self.interrupted.as_ref().filter(|ring| ring.in_flight() > 0)?;
        if std::mem::replace(&mut self.is_listening, true) {
            return None;
        }
        let fd = types::Fd(ring.as_raw_fd());
        Some(opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(COMMANDS))
    }

    /// That poll has ended.
    pub(super) const fn heard(&mut self) {
        self.is_listening = false;
    }
}
