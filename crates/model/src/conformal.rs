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
//! Property (test of the same name): `bound_holds_at_its_confidence`.

use rtvirtio_spec::profile::{Regime, Residuals};
use rtvirtio_units::{Confidence, Nanos};

/// The part of all calibrations whose bounds are to keep their confidence.
pub const ASSURANCE: f64 = 0.9;

/// The factor on a prediction at `confidence`; `None` with too few scores:
/// n must be at least confidence / (1 − confidence), 19 for 0.95. (The
/// [`ASSURANCE`] that the calibration is no lucky one needs 45.)
///
/// `scores` must be sorted, as a profile's are.
#[must_use]
pub fn factor(scores: &[f64], confidence: Confidence) -> Option<f64> {
    let n = scores.len();
    let least = ((n + 1) as f64 * confidence.get()).ceil() as usize;
    if least > n {
        return None;
    }
    // How many scores may lie above: P(Bin(n, 1 − confidence) ≤ above) ≤ 1 − ASSURANCE.
    let (miss, hit) = (1.0 - confidence.get(), confidence.get());
    let mut term = hit.powi(n as i32);
    let mut below = term;
    let mut above = 0;
    while below <= 1.0 - ASSURANCE && above < n {
        above += 1;
        term *= (n - above + 1) as f64 / above as f64 * miss / hit;
        below += term;
    }
    let rank = n - above.saturating_sub(1);
    scores.get(rank.max(least) - 1).map(|s| s.exp())
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
    factor(scores, Confidence::new(1.0 - share).ok()?)
}

/// The bound that `tasks` predictions of one VM in `regime` keep together at
/// `confidence` ([`shared`]). With too few scores of tasks, those of whole VMs
/// serve, each the largest of its tasks', of which the confidence itself is
/// asked. `None` with too few of either.
///
/// Under iocost the prediction is the longest wait that there may be, not a typical
/// one: scores of runs that did not meet it never make a bound shorter.
#[must_use]
pub fn bound(
    residuals: &Residuals,
    regime: Regime,
    predicted: Nanos,
    confidence: Confidence,
    tasks: usize,
) -> Option<Nanos> {
    let of_tasks = || shared(residuals.structural.get(&regime)?, confidence, tasks);
    let of_vms = || factor(residuals.structural_vms.get(&regime)?, confidence);
    let factor = of_tasks().or_else(of_vms)?;
    let least = if regime == Regime::Controlled { 1.0 } else { 0.0 };
    Some(predicted.scale(factor.max(least)))
}

#[cfg(test)]
mod tests {
    use super::*;

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
            bound(&residuals, regime, predicted, confidence(0.95), 1).unwrap().as_millis_f64()
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
            bound(&residuals, Regime::Flowing, predicted, confidence(0.95), tasks)
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
            bound(&residuals, Regime::Flowing, predicted, confidence(0.95), tasks)
        };
        assert_eq!(of(1), Some(Nanos::from_millis(100).scale(0.1_f64.exp())));
        assert_eq!(of(3), Some(Nanos::from_millis(100).scale(0.5_f64.exp())));
        let fewer = Residuals {
            structural_vms: [(Regime::Flowing, vec![0.5; 18])].into(),
            ..residuals.clone()
        };
        assert_eq!(
            bound(&fewer, Regime::Flowing, Nanos::from_millis(1), confidence(0.95), 3),
            None
        );
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
