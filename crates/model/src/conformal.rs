//! A one-sided conformal bound on top of a model.
//!
//! Conformal prediction with the multiplicative score s = ln(measured /
//! predicted): given n scores from runs like the one to come, predicted ×
//! exp(s₍ₖ₎) with k = ⌈(n + 1)·confidence⌉ is exceeded with probability at most
//! 1 − confidence, whatever the model's quality (Vovk et al. 2005). That is on
//! average over calibrations; a profile is one of them, so k is the least rank
//! at which nine of ten calibrations keep the confidence (Vovk 2012, Prop. 2a;
//! Wilks 1941), or the largest score where n is too small for that. A profile's
//! scores are of each probe under a fit to all the others (leave one out, as in
//! cross-conformal prediction; Barber et al. 2021). Task-runs of one probe are
//! not independent, so the confidence is held against runs that no fit has
//! seen (`bench --prediction`), not taken on trust. Scores are kept apart by regime
//! (Mondrian conformal prediction), so that a regime that the model knows
//! badly does not loosen the bound of one that it knows well.
//!
//! A machine that is late while it calibrates may be later when it counts, so its lateness widens bounds beyond what
//! the scores say. It is a time, which a long tail has no more of than a short one. So there are two bounds: one by
//! scores of tails that have their probe's lateness on top, which widens in proportion, and one by scores of tails as
//! they were measured, with the longest lateness of all probes added to it. Neither is shorter than what measured
//! scores alone bound at the confidence, so the shorter of both is taken: the first where tails are short, the second
//! where they are long.
//!
//! Properties (tests of the same names): `bound_holds_at_its_confidence`,
//! `lateness_widens_a_bound_by_no_more_than_itself`.

use std::collections::BTreeMap;

use rtvirtio_spec::profile::{Regime, Residuals};
use rtvirtio_units::{Confidence, Nanos};

/// The part of all calibrations whose bounds are to keep their confidence.
pub const ASSURANCE: f64 = 0.9;

/// The standard normal distribution's quantile at 1 − [`ASSURANCE`].
const LOW: f64 = -1.281_551_566;

/// Variance of a binomial distribution beyond which it is taken for a normal one: its terms are many
/// then, and the first of them becomes too small for a number. At 0.95 that is from 2,106 scores on.
const MANY: f64 = 100.0;

/// Tasks of which calibration takes the largest score of a VM.
const TASKS_OF_A_VM: usize = 3;

/// Tasks of a VM whose bounds hold together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Together {
    /// All of them, on whatever devices.
    pub all: usize,
    /// Those on the device of which the scores are.
    pub here: usize,
}

impl Together {
    /// So many tasks, all of them on one device.
    #[must_use]
    pub const fn on_one_device(tasks: usize) -> Self {
        Self { all: tasks, here: tasks }
    }
}

/// The factor on a prediction at `confidence`; `None` with too few scores:
/// n must be at least confidence / (1 − confidence), 19 for 0.95. (The
/// [`ASSURANCE`] that the calibration is no lucky one needs 45.)
///
/// `scores` must be sorted, as a profile's are.
#[must_use]
pub fn factor(scores: &[f64], confidence: Confidence) -> Option<f64> {
    factor_at(scores, confidence.get())
}

/// The same at a confidence that may be beyond the range of [`Confidence`], as that of a share is.
fn factor_at(scores: &[f64], confidence: f64) -> Option<f64> {
    let n = scores.len();
    let least = ((n + 1) as f64 * confidence).ceil() as usize;
    if least > n {
        return None;
    }
    let rank = n - may_lie_above(n, confidence);
    scores.get(rank.max(least) - 1).map(|s| s.exp())
}

/// How many of `n` scores may lie above the bound: the most with
/// P(Bin(n, 1 − confidence) ≤ above) ≤ 1 − [`ASSURANCE`], or none.
fn may_lie_above(n: usize, confidence: f64) -> usize {
    let (miss, hit) = (1.0 - confidence, confidence);
    let variance = n as f64 * miss * hit;
    if variance > MANY {
        // With corrections for whole numbers and for the skew (Cornish and Fisher 1938).
        let skew = (hit - miss) * (LOW * LOW - 1.0) / 6.0;
        return (n as f64 * miss + LOW * variance.sqrt() + skew - 0.5) as usize;
    }
    let mut term = hit.powi(n as i32);
    let mut below = term;
    let mut above = 0;
    while below <= 1.0 - ASSURANCE && above < n {
        above += 1;
        term *= (n - above + 1) as f64 / above as f64 * miss / hit;
        below += term;
    }
    above.saturating_sub(1)
}

/// How many scores [`shared`] needs: 19 for one task at 0.95, 59 for three.
#[must_use]
pub fn needed(confidence: Confidence, tasks: usize) -> usize {
    let share = 1.0 - (1.0 - confidence.get()) / tasks.max(1) as f64;
    // The nudge keeps 0.95 / 0.05 at 19.
    (share / (1.0 - share) - 1e-6).ceil().max(1.0) as usize
}

/// The factor on each of `tasks` predictions that keep their bounds together at
/// `confidence`: the chance of a miss is shared among them (Bonferroni). That
/// needs 1 / share − 1 scores, 59 for three tasks at 0.95; `None` with fewer.
#[must_use]
pub fn shared(scores: &[f64], confidence: Confidence, tasks: usize) -> Option<f64> {
    let share = (1.0 - confidence.get()) / tasks.max(1) as f64;
    factor_at(scores, 1.0 - share)
}

/// The bound that predictions of one VM's tasks in `regime` keep together at
/// `confidence` ([`shared`]). With too few scores of tasks, those of whole VMs
/// serve, each the largest of its tasks': they are asked for the part of the chance of a miss that
/// is of the tasks on this device, the confidence itself if all are, and say nothing of a VM with
/// more tasks than theirs had. `None` with too few of either.
///
/// Under iocost the prediction is the longest wait that there may be, not a typical
/// one: scores of runs that did not meet it never make a bound shorter.
#[must_use]
pub fn bound(
    residuals: &Residuals,
    regime: Regime,
    predicted: Nanos,
    confidence: Confidence,
    together: Together,
) -> Option<Nanos> {
    let Together { all, here } = together;
    let share = (1.0 - confidence.get()) * (here as f64 / all.max(1) as f64);
    let least = if regime == Regime::Controlled { 1.0 } else { 0.0 };
    let by = |tasks: &Scores, vms: &Scores| {
        let of_tasks = || shared(tasks.get(&regime)?, confidence, all);
        let of_vms = || factor_at(vms.get(&regime)?, 1.0 - share).filter(|_| here <= TASKS_OF_A_VM);
        Some(predicted.scale(of_tasks().or_else(of_vms)?.max(least)))
    };
    let in_proportion = by(&residuals.structural, &residuals.structural_vms)?;
    let with_lateness = || {
        let lateness = residuals.lateness.get(&regime)?;
        Some(by(&residuals.as_measured, &residuals.as_measured_vms)?.saturating_add(*lateness))
    };
    Some(with_lateness().map_or(in_proportion, |bound| bound.min(in_proportion)))
}

/// Sorted scores of each regime.
type Scores = BTreeMap<Regime, Vec<f64>>;

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Together = Together::on_one_device(1);

    fn confidence(value: f64) -> Confidence {
        Confidence::new(value).unwrap()
    }

    #[test]
    fn factor_of_19_scores_at_95_is_the_largest() {
        let scores: Vec<f64> = (0..19).map(f64::from).collect();
        assert_eq!(factor(&scores, confidence(0.95)), Some(18_f64.exp()));
    }

    #[test]
    fn one_score_less_than_needed_gives_no_factor() {
        for (level, tasks) in [(0.95, 1), (0.95, 2), (0.95, 3), (0.9, 1), (0.99, 4), (0.5, 1)] {
            let needed = needed(confidence(level), tasks);
            assert!(shared(&vec![0.0; needed], confidence(level), tasks).is_some(), "{level}");
            assert!(shared(&vec![0.0; needed - 1], confidence(level), tasks).is_none(), "{level}");
        }
        assert_eq!((needed(confidence(0.95), 1), needed(confidence(0.95), 3)), (19, 59));
    }

    #[test]
    fn factor_with_too_few_scores_is_none() {
        assert_eq!(factor(&[0.0; 18], confidence(0.95)), None);
        assert_eq!(factor(&[], confidence(0.5)), None);
    }

    #[test]
    fn bound_under_iocost_is_no_shorter_than_the_prediction() {
        let bound_in = |regime, score: f64| {
            let structural = [(regime, vec![score; 19])].into();
            let residuals = Residuals { structural, ..Residuals::default() };
            let predicted = Nanos::from_millis(20);
            bound(&residuals, regime, predicted, confidence(0.95), ALONE).unwrap().as_millis_f64()
        };
        assert!(bound_in(Regime::Flowing, -2.0) < 3.0);
        assert_eq!(bound_in(Regime::Controlled, -2.0), 20.0);
        assert!(bound_in(Regime::Controlled, 0.1) > 22.0);
    }

    #[test]
    fn bound_of_several_tasks_takes_a_higher_rank() {
        let scores: Vec<f64> = (0..99).map(|i| f64::from(i) / 100.0).collect();
        let structural = [(Regime::Flowing, scores)].into();
        let residuals = Residuals { structural, ..Residuals::default() };
        let of = |tasks| {
            let predicted = Nanos::from_millis(100);
            let together = Together::on_one_device(tasks);
            bound(&residuals, Regime::Flowing, predicted, confidence(0.95), together)
        };
        let times = |score: f64| Some(Nanos::from_millis(100).scale(score.exp()));
        // P(Bin(99, 0.05) ≤ 1) = 0.04 and ≤ 2: 0.12, so one may lie above; of three, whose share
        // is 0.05/3, P(Bin(99, 0.0167) ≤ 0) = 0.19, so none.
        assert_eq!(of(1), times(0.97));
        assert_eq!(of(3), times(0.98));
        // Six would take rank 100 (1 − 0.05/6 = 0.992).
        assert_eq!(of(6), None);
    }

    #[test]
    fn bound_with_too_few_task_scores_takes_those_of_vms() {
        let residuals = Residuals {
            structural: [(Regime::Flowing, vec![0.1; 40])].into(),
            structural_vms: [(Regime::Flowing, vec![0.5; 19])].into(),
            ..Residuals::default()
        };
        let of = |tasks| {
            let predicted = Nanos::from_millis(100);
            let together = Together::on_one_device(tasks);
            bound(&residuals, Regime::Flowing, predicted, confidence(0.95), together)
        };
        assert_eq!(of(1), Some(Nanos::from_millis(100).scale(0.1_f64.exp())));
        assert_eq!(of(3), Some(Nanos::from_millis(100).scale(0.5_f64.exp())));
        let fewer = Residuals {
            structural_vms: [(Regime::Flowing, vec![0.5; 18])].into(),
            ..residuals.clone()
        };
        let together = Together::on_one_device(3);
        let of_fewer =
            bound(&fewer, Regime::Flowing, Nanos::from_millis(1), confidence(0.95), together);
        assert_eq!(of_fewer, None);
    }

    #[test]
    fn bound_of_more_tasks_than_vm_scores_are_of_needs_scores_of_tasks() {
        let of = |scores: usize, tasks: usize| {
            let residuals = Residuals {
                structural: [(Regime::Flowing, vec![0.1; scores])].into(),
                structural_vms: [(Regime::Flowing, vec![0.5; 100])].into(),
                ..Residuals::default()
            };
            let together = Together::on_one_device(tasks);
            let predicted = Nanos::from_millis(100);
            bound(&residuals, Regime::Flowing, predicted, confidence(0.95), together)
        };
        let times = |score: f64| Some(Nanos::from_millis(100).scale(score.exp()));
        assert_eq!(of(58, 3), times(0.5));
        assert_eq!((of(58, 4), of(300, 20)), (None, None));
        // What is lacking is what is said to be.
        for tasks in [4, 20, 64] {
            assert_eq!(of(needed(confidence(0.95), tasks), tasks), times(0.1), "{tasks}");
        }
    }

    /// A VM with a task on each of three devices misses on any of them.
    #[test]
    fn vm_scores_of_one_device_bound_its_part_of_the_tasks() {
        let of = |vms: usize, together| {
            let structural_vms = [(Regime::Flowing, vec![0.5; vms])].into();
            let residuals = Residuals { structural_vms, ..Residuals::default() };
            let predicted = Nanos::from_millis(1);
            bound(&residuals, Regime::Flowing, predicted, confidence(0.95), together)
        };
        assert!(of(19, Together::on_one_device(3)).is_some());
        let elsewhere_too = Together { all: 3, here: 1 };
        assert!(of(58, elsewhere_too).is_none() && of(59, elsewhere_too).is_some());
    }

    /// The same as [`may_lie_above`], from the logarithms of all terms.
    fn counted(n: usize, confidence: f64) -> usize {
        let odds = ((1.0 - confidence) / confidence).ln();
        let mut term = n as f64 * confidence.ln();
        let mut below = term.exp();
        let mut above = 0;
        while below <= 1.0 - ASSURANCE && above < n {
            above += 1;
            term += ((n - above + 1) as f64 / above as f64).ln() + odds;
            below += term.exp();
        }
        above.saturating_sub(1)
    }

    #[test]
    fn assurance_holds_with_many_scores() {
        // 1,000 of 20,000 are expected above, and 961 or more are in nine of ten calibrations.
        let scores: Vec<f64> = (0..20_000).map(|i| f64::from(i) / 20_000.0).collect();
        assert_eq!(counted(20_000, 0.95), 960);
        assert_eq!(factor(&scores, confidence(0.95)), Some((19_039.0_f64 / 20_000.0).exp()));
        for level in [0.5, 0.9, 0.95, 0.99, 0.9975, 0.999] {
            for n in [1_100, 14_600, 20_000, 100_000] {
                let (found, counted) = (may_lie_above(n, level), counted(n, level));
                assert!(found.abs_diff(counted) <= 1, "{level}, {n}: {found}, {counted}");
            }
        }
    }

    #[test]
    fn rank_goes_on_where_the_distribution_is_taken_for_a_normal_one() {
        for level in [0.5, 0.9, 0.95, 0.99, 0.999] {
            let from = MANY / (level * (1.0 - level));
            let near = (from * 0.9) as usize..(from * 1.1) as usize;
            let of_each: Vec<usize> = near.map(|n| may_lie_above(n, level)).collect();
            assert!(of_each.windows(2).all(|w| (0..=1).contains(&(w[1] - w[0]))), "{of_each:?}");
        }
    }

    #[test]
    fn lateness_widens_a_bound_by_no_more_than_itself() {
        let bound_in = |lateness: Option<u64>, predicted| {
            let lateness = lateness.map(|us| (Regime::Bursting, Nanos::from_micros(us)));
            let residuals = Residuals {
                structural: [(Regime::Bursting, vec![0.4; 60])].into(),
                as_measured: [(Regime::Bursting, vec![0.1; 60])].into(),
                lateness: lateness.into_iter().collect(),
                ..Residuals::default()
            };
            let together = Together::on_one_device(3);
            let predicted = Nanos::from_micros(predicted);
            let bound =
                bound(&residuals, Regime::Bursting, predicted, confidence(0.95), together).unwrap();
            bound.as_millis_f64()
        };
        let near = |bound: f64, expected: f64| assert!((bound - expected).abs() < 1e-3, "{bound}");
        // Long tails have the lateness itself, short ones a part of what they are, and none is shorter than the scores say.
        near(bound_in(Some(600), 10_000), 10.0 * 0.1_f64.exp() + 0.6);
        near(bound_in(Some(600), 1_000), 0.4_f64.exp());
        near(bound_in(Some(0), 1_000), 0.1_f64.exp());
        // Profiles of before have no measured scores.
        near(bound_in(None, 10_000), 10.0 * 0.4_f64.exp());
    }

    /// Numbers from 0 to 1 by a fixed linear congruential sequence.
    fn uniform(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (*state >> 40) as f64 / (1_u64 << 24) as f64
    }

    #[test]
    fn most_calibrations_keep_their_confidence() {
        // Of uniform scores, a fraction s is below s.
        let mut state = 1;
        let keeps = (0..1000)
            .filter(|_| {
                let mut scores: Vec<f64> = (0..63).map(|_| uniform(&mut state)).collect();
                scores.sort_by(f64::total_cmp);
                factor(&scores, confidence(0.95)).unwrap().ln() >= 0.95
            })
            .count();
        // P(Bin(63, 0.05) ≤ 0) = 0.04; ≤ 1 would be 0.17.
        assert!((940..980).contains(&keeps), "{keeps} of 1000");
    }

    #[test]
    fn bound_holds_at_its_confidence() {
        // Each score is held against the rest.
        let mut state = 1;
        let scores: Vec<f64> = (0..400).map(|_| uniform(&mut state)).collect();
        let held = (0..scores.len())
            .filter(|&i| {
                let mut rest = scores.clone();
                let left_out = rest.remove(i);
                rest.sort_by(f64::total_cmp);
                left_out.exp() <= factor(&rest, confidence(0.9)).unwrap()
            })
            .count();
        assert!((360..=368).contains(&held), "{held} of 400");
    }
}
