//! Time as timers of the kernel count it: in ticks, 250 a second as Debian's kernels have them.

/// A tick, ns.
pub(super) const TICK: u64 = 4_000_000;

/// The tick at which `time` has passed that began within the tick of `now`.
pub(super) const fn after(now: u64, time: u64) -> u64 {
    (now / TICK + time.div_ceil(TICK)) * TICK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_counted_in_whole_ticks() {
        assert_eq!(after(0, 1), TICK);
        assert_eq!(after(TICK - 1, TICK), TICK);
        assert_eq!(after(TICK, TICK + 1), 3 * TICK);
    }
}
