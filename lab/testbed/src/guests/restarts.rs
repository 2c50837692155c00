//! QEMU's own death, told from one that somebody caused.
//!
//! In QEMU before 10.0.4 and 10.1 a vCPU under TCG may use a table of memory regions that another
//! thread has freed (fixed by its commit 2865bf1c5795, "system/physmem: fix use-after-free with
//! dispatch"). It happens with several vCPUs while the guest sets up PCI, before anything that is
//! tested or measured; one translating thread (`thread=single`) would avoid it, and with it what
//! several vCPUs are there for. And once a vCPU of a booting guest got no interrupt of its timer any
//! more, on a loaded machine; the cause is not known, but no disk has a part in it.
//!
//! So such a guest is started again: only while it boots, only if QEMU's or the guest's last words
//! are one of these, a few times, and each time said aloud.

/// QEMU's last words: regions that no longer are what the vCPU takes them for. And those of a guest
/// whose vCPU does not get its timer's interrupt any more.
const FAULTS: [&str; 3] =
    ["iotlb_to_section: Assertion", "msix_table_mmio_write: Assertion", Restarts::TIMER_LOST];

/// Starts of one guest after its first.
#[derive(Debug, Default)]
pub struct Restarts(u32);

impl Restarts {
    const MAX: u32 = 2;
    /// What Linux says that waits for a timer in vain (`kernel/rcu/tree_stall.h`). It does not come
    /// back.
    pub const TIMER_LOST: &str = "kthread timer wakeup didn't happen";

    /// Whether a guest that died while it booted may be started again, after QEMU said this.
    pub fn may(&mut self, guest: &str, said: &str) -> bool {
        let Some(fault) = FAULTS.into_iter().find(|fault| said.contains(fault)) else {
            return false;
        };
        if self.0 == Self::MAX {
            return false;
        }
        self.0 += 1;
        let (number, most) = (self.0, Self::MAX);
        eprintln!(
            "guest {guest} failed while it booted, of a fault of QEMU's ({fault}): \
             started again, {number} of {most}"
        );
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "qemu-system-x86_64: system/physmem.c:2678: iotlb_to_section: Assertion \
                        `section_index < d->map.sections_nb' failed.";

    #[test]
    fn qemu_that_died_of_its_own_fault_is_started_again_twice() {
        let mut restarts = Restarts::default();
        let allowed = [SAID; 3].map(|said| restarts.may("plc", said));
        assert_eq!(allowed, [true, true, false]);
    }

    #[test]
    fn qemu_that_died_of_anything_else_is_not_started_again() {
        for said in ["", "Failed to connect to 'disk.sock'", "vhost_user_blk: Assertion `x' failed"]
        {
            assert!(!Restarts::default().may("plc", said), "{said}");
        }
    }
}
