//! When throughput has come to rest after a change of load.

use rtvirtio_iocores::SAMPLE;
use rtvirtio_units::Nanos;

/// Samples that are compared as one: 100 ms.
const POINT: usize = 10;
/// Of those, how many in a row must hold.
const POINTS: usize = 3;
/// Requests in 100 ms from which on a difference of 5 % is not chance.
const FEWEST: f64 = 1_000.0;

/// When it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// There are too few requests to tell.
    TooLittle,
    /// Not at all.
    Never,
    /// So long after the change.
    After(Nanos),
}

/// When the rate first was within 5 % of what it was in the phase's second half, or above, and stayed so
/// for 300 ms. `requests` are those of each [`SAMPLE`] of the phase.
#[must_use]
pub fn settled(requests: &[u32]) -> Settled {
    let rate =
        |of: &[u32]| of.iter().map(|&requests| f64::from(requests)).sum::<f64>() / of.len() as f64;
    let half = &requests[requests.len() / 2..];
    if half.is_empty() || rate(half) * (POINT as f64) < FEWEST {
        return Settled::TooLittle;
    }
    let steady = rate(half);
    let holds = |of: &[u32]| of.chunks(POINT).all(|of| rate(of) >= 0.95 * steady);
    let first = requests.windows(POINTS * POINT).position(holds);
    first.map_or(Settled::Never, |first| Settled::After(Nanos::new(SAMPLE.get() * first as u64)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(of: &[(usize, u32)]) -> Vec<u32> {
        of.iter().flat_map(|&(n, requests)| vec![requests; n]).collect()
    }

    #[test]
    fn rate_is_settled_when_it_stays_within_5_per_cent_of_the_second_half() {
        // 200 ms of half the rate, a moment of all, half again, then 95 %, then all.
        let slow = samples(&[(20, 500), (10, 1000), (10, 500), (20, 960), (140, 1000)]);
        assert_eq!(settled(&slow), Settled::After(Nanos::from_millis(400)));
        assert_eq!(settled(&samples(&[(200, 1000)])), Settled::After(Nanos::ZERO));
        assert_eq!(settled(&samples(&[(200, 10)])), Settled::TooLittle);
        assert_eq!(settled(&[]), Settled::TooLittle);
        // In no 300 ms is it without a dip.
        let swings = samples(&[(20, 1000), (10, 500)]).repeat(20);
        assert_eq!(settled(&swings), Settled::Never);
    }
}
