//! The file says 10 ms of everything, trained on the device of the tests' profile at its throughput, on
//! 100 to 1,500 IOPS; its scores are all 0.1 (`crates/model/tests/data/make.py`).

use rtvirtio_spec::plan::TaskPromise;
use rtvirtio_spec::settings::{DeviceSettings, Knobs, Settings};
use rtvirtio_spec::specification::Specification;
use rtvirtio_units::BytesPerSecond;

use super::*;
use crate::tests::profile::profile;
use crate::tests::{found, specification};
use crate::{Plan, predict};

const CONSTANT: &[u8] = include_bytes!("../../../model/tests/data/constant.onnx");
const UNDESCRIBED: &[u8] = include_bytes!("../../../model/tests/data/many_operators.onnx");

fn file(bytes: &[u8]) -> Learned {
    Learned::from_bytes(bytes).unwrap()
}

fn plan(specification: &Specification, profile: &Profile, model: Model<'_>) -> Plan {
    let found = [(specification.devices[0].name.clone(), found(profile, model))].into();
    crate::plan(specification, &found, &Knobs::new()).unwrap()
}

/// Who predicted each task's tail.
fn by(plan: &Plan) -> Vec<PredictedBy> {
    plan.tasks.iter().map(|t| t.model).collect()
}

#[test]
fn learned_model_predicts_and_bounds_within_its_range() {
    let specification = specification(&[("a", 100.0, 12.0), ("b", 1500.0, 11.0)], false);
    let learned = file(CONSTANT);
    let plan = plan(&specification, &profile(), Model::Learned(&learned));
    assert_eq!(by(&plan), [PredictedBy::Learned; 2], "{:?}", plan.tasks);
    for task in &plan.tasks {
        assert_eq!((task.predicted, &task.fallback), (Nanos::from_millis(10), &None));
        // 10 ms x e^0.1.
        assert_eq!(task.bound.map(Nanos::get), Some(11_051_709));
    }
    assert_eq!(plan.tasks[0].unmet, None);
    let unmet = plan.tasks[1].why_unmet().unwrap();
    assert!(unmet.contains("bounded by 11.05 ms (predicted 10.00 ms)"), "{unmet}");
}

#[test]
fn row_out_of_range_falls_back_to_the_structural_model_and_says_so() {
    let specification = specification(&[("a", 2000.0, 40.0), ("b", 100.0, 40.0)], false);
    let (learned, profile) = (file(CONSTANT), profile());
    let by_model = plan(&specification, &profile, Model::Learned(&learned));
    assert_eq!(by(&by_model), [PredictedBy::Structural, PredictedBy::Learned]);
    let fallback = by_model.tasks[0].fallback.as_ref().map(Fallback::to_string);
    let expected = "the structural model: task_iops is 2000, its training had 100 to 1500";
    assert_eq!(fallback.as_deref(), Some(expected));
    assert_eq!(by_model.tasks[1].fallback, None);
    let structural = plan(&specification, &profile, Model::Structural);
    let said = |t: &TaskPromise| (t.predicted, t.bound);
    assert_eq!(said(&by_model.tasks[0]), said(&structural.tasks[0]));
    assert_eq!(by(&structural), [PredictedBy::Structural; 2]);
    assert!(structural.tasks.iter().all(|t| t.fallback.is_none()));
}

/// Under one cap the model answers; two capped VMs are beyond its range, and there the structural
/// model would meet what the learned one does not.
#[test]
fn search_does_not_leave_the_range_to_look_better() {
    let vms = [("a", 100.0, 10.5), ("b", 100.0, 10.6)];
    let (specification, profile) = (specification(&vms, true), profile());
    let learned = file(CONSTANT);
    let structural = plan(&specification, &profile, Model::Structural);
    assert!(structural.meets_all(), "{:?}", structural.tasks);
    let plan = plan(&specification, &profile, Model::Learned(&learned));
    assert_eq!(by(&plan), [PredictedBy::Learned; 2]);
    assert!(plan.tasks.iter().all(|t| t.unmet.is_some()), "{:?}", plan.tasks);
}

#[test]
fn model_of_another_device_or_throughput_is_not_asked() {
    let specification = specification(&[("a", 100.0, 40.0)], false);
    let (learned, profile) = (file(CONSTANT), profile());
    let why = |profile: &Profile| {
        let mut device = found(profile, Model::Learned(&learned));
        device.identity = profile.device.clone();
        let found = [(specification.devices[0].name.clone(), device)].into();
        let plan = crate::plan(&specification, &found, &Knobs::new()).unwrap();
        assert_eq!(by(&plan), [PredictedBy::Structural]);
        plan.tasks[0].fallback.as_ref().unwrap().to_string()
    };
    let mut other = profile.clone();
    other.device.model = "another".to_owned();
    let said = why(&other);
    assert!(
        said.contains("is of loop ref-4x250") && said.contains("not of loop another"),
        "{said}"
    );
    let mut slower = profile.clone();
    slower.capacity.write_throughput = BytesPerSecond::from_megabytes(250);
    let said = why(&slower);
    assert!(said.contains("wrote 371") && said.contains("250"), "{said}");
}

#[test]
fn file_without_a_description_predicts_and_the_structural_model_bounds() {
    let specification = specification(&[("a", 2000.0, 900.0)], false);
    let (learned, profile) = (file(UNDESCRIBED), profile());
    let task = plan(&specification, &profile, Model::Learned(&learned)).tasks.remove(0);
    assert_eq!(task.model, PredictedBy::Learned);
    let fallback = task.fallback.unwrap().to_string();
    assert!(fallback.contains("does not describe itself; nor is its range known"), "{fallback}");
    let structural = plan(&specification, &profile, Model::Structural).tasks.remove(0);
    assert_eq!(task.bound, structural.bound.map(|bound| bound.max(task.predicted)));
}

#[test]
fn analytical_model_plans_where_bfq_idles() {
    let vms = [("a", 200.0), ("b", 300.0), ("c", 500.0), ("d", 800.0)].map(|(n, t)| (n, 500.0, t));
    let plan = plan(&specification(&vms, false), &profile(), Model::Analytical);
    let Scheduler::Bfq(bfq) = plan.settings.0.values().next().unwrap().scheduler else {
        panic!("not bfq");
    };
    assert_eq!((bfq.slice_idle_us, bfq.timeout_sync_ms), (1000, 32));
    assert_eq!(by(&plan), [PredictedBy::Analytical; 4]);
    assert!(plan.meets_all(), "{:?}", plan.tasks);
    // Weights 1000, 666, 400 and 250; E(SI) is 0.5 x 8 / 1. (2000 + 8192 - 4) / (4 x 0.4318 x 245000 x
    // 0.36) + (6000 + 8192) / (4 x 245000) + 0.7 x 0.032.
    let first = &plan.tasks[0];
    assert!((first.predicted.as_millis_f64() - 103.8).abs() < 0.1, "{}", first.predicted);
    // Its scores are 0.
    assert_eq!((first.bound, &first.fallback), (Some(first.predicted), &None));
}

#[test]
fn analytical_model_is_not_asked_where_nothing_idles() {
    let specification = specification(&[("a", 100.0, 40.0)], false);
    let profile = profile();
    let device = specification.devices[0].name.clone();
    let found = [(device.clone(), found(&profile, Model::Analytical))].into();
    let none = DeviceSettings { scheduler: Scheduler::None, vms: [].into() };
    let said = predict(&specification, &found, &Settings([(device, none)].into())).unwrap();
    assert_eq!(said[0].promise.model, PredictedBy::Structural);
    let fallback = said[0].promise.fallback.as_ref().map(Fallback::to_string);
    let expected = "the structural model: the analytical one speaks of bfq that idles only";
    assert_eq!(fallback.as_deref(), Some(expected));
}

#[test]
fn learned_model_is_not_asked_about_iocost() {
    let specification = specification(&[("a", 500.0, 40.0)], true);
    let (learned, profile) = (file(CONSTANT), profile());
    let device = specification.devices[0].name.clone();
    let answered = |scheduler: Scheduler| {
        let settings = DeviceSettings { scheduler, vms: Default::default() };
        let settings = Settings([(device.clone(), settings)].into());
        let found = [(device.clone(), found(&profile, Model::Learned(&learned)))].into();
        predict(&specification, &found, &settings).unwrap().remove(0).promise
    };
    assert_eq!(answered(Scheduler::None).model, PredictedBy::Learned);
    let bps = BytesPerSecond::from_megabytes(371);
    let cost = rtvirtio_spec::settings::IoCost {
        bps,
        iops: 16_000,
        read_latency_us: 2_000,
        write_latency_us: 2_000,
        vrate: rtvirtio_spec::settings::IoCost::ANY_SCALE,
    };
    let under = answered(Scheduler::IoCost(cost));
    assert_eq!(under.model, PredictedBy::Structural);
    let why = under.fallback.unwrap();
    assert_eq!(why.why, NoAnswer::IoCost, "{why}");
}
