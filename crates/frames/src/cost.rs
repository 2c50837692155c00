//! What frames cost the IOThread that serves them, estimated, in ns: turns are counted in it, and promises admitted by it.

/// A turn of a queue.
pub const QUANTUM_NS: i64 = 12_800;
/// Of a frame to or from a TAP or a socket, which the kernel handles (1.1 to 2.2 µs were measured, with a system call for each).
pub const TAP_FRAME_NS: i64 = 1_600;
/// Of a frame of a switch, at each of its two queues (35 to 90 ns were measured).
pub const PORT_FRAME_NS: i64 = 125;
/// Of telling a queue of a frame, or of dropping one.
pub const NOTE_NS: i64 = 60;

/// Of following a chain and copying by its pieces. A driver's own chains have a few of them, which the others' costs
/// include; one that means harm has a thousand, of a byte each.
#[must_use]
pub const fn pieces_ns(pieces: usize) -> i64 {
    const INCLUDED: usize = 16;
    const PIECE_NS: i64 = 10;
    pieces.saturating_sub(INCLUDED) as i64 * PIECE_NS
}

/// Of a frame's bytes by a system call.
#[must_use]
pub const fn tap_ns(bytes: usize) -> i64 {
    TAP_FRAME_NS + bytes as i64 * 80 / 1024
}

/// Of a frame's bytes by a copy.
#[must_use]
pub const fn port_ns(bytes: usize) -> i64 {
    PORT_FRAME_NS + bytes as i64 * 60 / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_of_many_pieces_costs_more_than_one_of_a_few() {
        assert_eq!((pieces_ns(0), pieces_ns(16)), (0, 0));
        // The longest is no more than a turn.
        assert!((QUANTUM_NS / 2..QUANTUM_NS).contains(&pieces_ns(1024)));
    }
}
