//! Which model is asked for a task's tail, and what happens where it has no answer.
//!
//! Where the model that was asked says nothing (a row out of the range of its training, another
//! device, a scheduler that it does not know), the structural model stands in; where it has too few scores
//! for a bound, the bound is the structural model's, or the prediction if that is more. Either way the
//! promise says so ([`TaskPromise::fallback`]). What is delivered is the structural model's word throughout:
//! no other model speaks of rates.
//!
//! The search prefers settings for which the model that was asked answers: else it would leave that
//! model's range wherever the structural one promises more. So it stays where bfq idles if the paper's model
//! is asked, which speaks of nothing else, nor of caps and percentiles.
//!
//! [`TaskPromise::fallback`]: rtvirtio_spec::plan::TaskPromise::fallback

use rtvirtio_model::conformal::{self, Together};
use rtvirtio_model::features::features;
use rtvirtio_model::learned::Learned;
use rtvirtio_model::paper::{self, Reading};
use rtvirtio_model::{DeviceLoad, Estimate};
use rtvirtio_spec::plan::{Fallback, FallbackOf, NoAnswer, PredictedBy};
use rtvirtio_spec::profile::{DeviceIdentity, Profile};
use rtvirtio_spec::settings::Scheduler;
use rtvirtio_spec::specification::Target;
use rtvirtio_units::Nanos;

/// How much faster or slower a device may write than at its model's training: a judgement. The same
/// change of a device that the data plane serves makes `watch --control` plan again.
const SAME_THROUGHPUT: f64 = 1.25;

/// Which model predicts a device's tails.
#[derive(Debug, Clone, Copy, Default)]
pub enum Model<'a> {
    /// What calibration fitted.
    #[default]
    Structural,
    /// The paper's, λ refit by calibration, in the corrected reading.
    Analytical,
    /// A regressor in an ONNX file.
    Learned(&'a Learned),
}

/// A task that a model is asked about.
pub(crate) struct Question<'a> {
    pub(crate) load: &'a DeviceLoad,
    /// Its VM and itself, by place in `load`.
    pub(crate) vm: usize,
    pub(crate) task: usize,
    pub(crate) target: Target,
    /// For how many tasks together the bound is to hold.
    pub(crate) together: Together,
}

/// A prediction, and who made it.
pub(crate) struct Answer {
    pub(crate) predicted: Nanos,
    pub(crate) bound: Option<Nanos>,
    pub(crate) by: PredictedBy,
    pub(crate) fallback: Option<Fallback>,
}

/// What `model` says, with the structural `estimate` where it says nothing.
pub(crate) fn ask(
    model: Model<'_>,
    profile: &Profile,
    question: &Question<'_>,
    estimate: &Estimate,
) -> Answer {
    let &Question { target, together, .. } = question;
    let structural = conformal::bound(
        &profile.residuals,
        estimate.regime,
        estimate.tail,
        target.confidence,
        together,
    );
    let (by, said) = match model {
        Model::Structural => {
            let by = PredictedBy::Structural;
            return Answer { predicted: estimate.tail, bound: structural, by, fallback: None };
        }
        Model::Analytical => (PredictedBy::Analytical, analytical(profile, question, estimate)),
        Model::Learned(learned) => {
            (PredictedBy::Learned, self::learned(learned, profile, question))
        }
    };
    match said {
        Ok((predicted, Ok(bound))) => Answer { predicted, bound: Some(bound), by, fallback: None },
        Ok((predicted, Err(why))) => Answer {
            predicted,
            bound: structural.map(|bound| bound.max(predicted)),
            by,
            fallback: Some(Fallback { of: FallbackOf::Bound, why }),
        },
        Err(why) => Answer {
            predicted: estimate.tail,
            bound: structural,
            by: PredictedBy::Structural,
            fallback: Some(Fallback { of: FallbackOf::Prediction, why }),
        },
    }
}

/// A prediction and its bound; or why there is no bound; or why there is neither.
type Said = Result<(Nanos, Result<Nanos, NoAnswer>), NoAnswer>;

fn analytical(profile: &Profile, question: &Question<'_>, estimate: &Estimate) -> Said {
    let idles = matches!(question.load.scheduler, Scheduler::Bfq(b) if b.slice_idle_us > 0);
    if !idles {
        return Err(NoAnswer::NotIdling);
    }
    let (load, vm) = (question.load, question.vm);
    let predicted = paper::host_part(&profile.paper, load, vm, Reading::Corrected);
    let scores = profile.residuals.paper.get(&estimate.regime).map_or(&[][..], Vec::as_slice);
    let factor = conformal::shared(scores, question.target.confidence, question.together.all);
    let few = NoAnswer::TooFewRuns { has: scores.len() };
    Ok((predicted, factor.map(|factor| predicted.scale(factor)).ok_or(few)))
}

fn learned(learned: &Learned, profile: &Profile, question: &Question<'_>) -> Said {
    if let Some(description) = learned.description() {
        is_of(&description.device, &profile.device)?;
        let [then, now] = [description.write_throughput, profile.capacity.write_throughput];
        let ratio = now.get() as f64 / then.get() as f64;
        if !(1.0 / SAME_THROUGHPUT..=SAME_THROUGHPUT).contains(&ratio) {
            return Err(NoAnswer::OtherThroughput { then, now });
        }
    }
    let &Question { load, vm, task, target, together } = question;
    // No feature tells iocost from a device that nobody controls.
    if matches!(load.scheduler, Scheduler::IoCost(_)) {
        return Err(NoAnswer::IoCost);
    }
    // Of the guest's bfq nothing is known while the host is planned: features of none.
    let row = features(load, None, vm, task, target.percentile);
    let predicted =
        learned.predict(&row).map_err(|why| NoAnswer::Learned { why: why.to_string() })?;
    let bound = learned.bound(&row, predicted, target.confidence, together.all);
    let none = || match learned.description() {
        None => NoAnswer::NotDescribed,
        Some(_) => NoAnswer::TooFewScores,
    };
    Ok((predicted.tail, bound.ok_or_else(none)))
}

/// Refuses a model that was trained on another device.
fn is_of(trained: &DeviceIdentity, device: &DeviceIdentity) -> Result<(), NoAnswer> {
    if trained == device {
        return Ok(());
    }
    let (trained, found) = (Box::new(trained.clone()), Box::new(device.clone()));
    Err(NoAnswer::OtherDevice { trained, found })
}

#[cfg(test)]
mod tests;
