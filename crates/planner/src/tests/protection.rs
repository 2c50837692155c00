//! What a plan does that cannot promise: it protects at least as well as a careful operator would by
//! hand, and the less it knows, the more.

use proptest::prelude::*;
use rtvirtio_spec::settings::Bfq;
use rtvirtio_units::BytesPerSecond;

use super::*;

/// The hand setting's cap on a background VM.
const BY_HAND: BytesPerSecond = BytesPerSecond::from_megabytes(10);

fn planned_with(specification: &Specification, profile: &Profile) -> Plan {
    let found = found(profile, Model::Structural);
    let found = BTreeMap::from([(specification.devices[0].name.clone(), found)]);
    plan(specification, &found, &Knobs::new()).unwrap()
}

/// Bytes a second that the background VMs are left, `f64::INFINITY` without a cap.
fn left(plan: &Plan) -> f64 {
    plan.background.iter().map(|b| b.cap.map_or(f64::INFINITY, |cap| cap.get() as f64)).sum()
}

fn idles(plan: &Plan) -> bool {
    let settings = plan.settings.0.values().next().unwrap();
    matches!(settings.scheduler, Scheduler::Bfq(Bfq { slice_idle_us, low_latency, .. })
        if slice_idle_us > 0 || low_latency)
}

fn assert_protects_as_by_hand(plan: &Plan) {
    assert!(!plan.background.is_empty() && !idles(plan), "{:?}", plan.settings);
    for share in &plan.background {
        assert!(share.cap.is_some_and(|cap| cap <= BY_HAND), "{share:?}");
    }
}

/// Four VMs, and in the background one that declares nothing and one that does.
fn with_declared_background(latency_ms: f64) -> Specification {
    let text =
        rtvirtio_spec::specification::to_toml(&specification(&[("a", 500.0, latency_ms)], true));
    let declared = "[[vm]]\nname = \"copy\"\n[[vm.disk]]\nname = \"d\"\ndevice = \"data\"\n\
        [[vm.task]]\nname = \"t\"\nblock_size = \"128k\"\nqueue_depth = 64\n";
    parse("test.toml", &format!("{text}\n{declared}")).unwrap()
}

#[test]
fn profile_with_too_few_runs_or_none_protects_as_by_hand() {
    for runs in [0, 1, 18] {
        let mut profile = profile();
        let residuals = &mut profile.residuals;
        for by_regime in [&mut residuals.structural, &mut residuals.structural_vms] {
            by_regime.values_mut().for_each(|scores| scores.truncate(runs));
            by_regime.retain(|_, scores| !scores.is_empty());
        }
        for specification in [strict(true), with_declared_background(10.0)] {
            let plan = planned_with(&specification, &profile);
            assert!(!plan.meets_all());
            assert_protects_as_by_hand(&plan);
        }
    }
}

#[test]
fn targets_of_a_tenth_of_a_millisecond_protect_as_by_hand() {
    let vms = [("a", 1500.0, 0.1), ("b", 1500.0, 0.1), ("c", 500.0, 0.1), ("d", 100.0, 0.1)];
    let plan = planned(&specification(&vms, true));
    assert!(plan.tasks.iter().all(|t| t.unmet.is_some()));
    // Nobody is given up: that would meet nothing.
    assert!(plan.tasks.iter().all(|t| !t.why_unmet().unwrap().contains("given up")));
    let held_by = plan.background[0].binding_constraint.as_ref().unwrap().to_string();
    assert_eq!(held_by, "what is kept for a/t, whose target is not met");
    assert_protects_as_by_hand(&plan);
    assert_protects_as_by_hand(&planned(&with_declared_background(0.1)));
}

#[test]
fn one_target_that_cannot_be_met_leaves_the_others_theirs() {
    let plan = planned(&specification(&[("a", 100.0, 0.1), ("b", 1500.0, 15.0)], true));
    let unmet: Vec<_> = plan.tasks.iter().map(|t| t.unmet.is_some()).collect();
    assert_eq!(unmet, [true, false]);
    assert_protects_as_by_hand(&plan);
}

#[test]
fn plan_that_cannot_promise_says_what_would_be_promised() {
    let mut profile = profile();
    profile.residuals.structural.values_mut().for_each(|scores| scores.truncate(11));
    profile.residuals.structural_vms.clear();
    let plan = planned_with(&strict(true), &profile);
    let reason = plan.tasks[0].why_unmet().unwrap();
    assert!(
        reason.contains("11 with a background VM within a cap where 19 are needed"),
        "{reason}"
    );
    assert!(reason.contains("calibrate again"), "{reason}");
    let plan = planned(&specification(&[("a", 1500.0, 0.1)], true));
    let reason = plan.tasks[0].why_unmet().unwrap();
    assert!(reason.contains("would be promised"), "{reason}");
}

prop_compose! {
    /// One to four VMs with targets between impossible and lax, beside a writer.
    fn any_specification()(vms in prop::collection::vec((50.0..1500.0_f64, 0.1..60.0_f64), 1..=4))
        -> Vec<(String, f64, f64)>
    {
        vms.into_iter().enumerate().map(|(i, (iops, ms))| (format!("vm{i}"), iops.round(), ms)).collect()
    }
}

fn specified(vms: &[(String, f64, f64)], scale: f64) -> Specification {
    let vms: Vec<_> = vms.iter().map(|(n, iops, ms)| (n.as_str(), *iops, ms * scale)).collect();
    specification(&vms, true)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn adding_uncertainty_never_lowers_protection(
        vms in any_specification(),
        wider in 0.0..3.0_f64,
        kept in 0..100_usize,
    ) {
        let specification = specified(&vms, 1.0);
        let sure = planned_with(&specification, &profile());
        // Longer scores; fewer of them, the luckiest; a higher confidence.
        let mut longer = profile();
        let residuals = &mut longer.residuals;
        for by_regime in [&mut residuals.structural, &mut residuals.structural_vms] {
            by_regime.values_mut().flatten().for_each(|score| *score += wider);
        }
        let mut fewer = profile();
        fewer.residuals.structural.values_mut().for_each(|scores| scores.truncate(kept));
        fewer.residuals.structural_vms.values_mut().for_each(|scores| scores.truncate(kept.min(18)));
        let mut surer = specification.clone();
        for task in surer.vms.iter_mut().flat_map(|vm| &mut vm.tasks) {
            if let Some(target) = &mut task.target {
                target.confidence = Confidence::new(0.995).unwrap();
            }
        }
        let unsure = [
            planned_with(&specification, &longer),
            planned_with(&specification, &fewer),
            planned_with(&surer, &profile()),
        ];
        for plan in &unsure {
            prop_assert!(left(plan) <= left(&sure), "{} > {}", left(plan), left(&sure));
            prop_assert!(!idles(plan));
        }
    }

    #[test]
    fn unmet_target_never_raises_the_backgrounds_share(
        vms in any_specification(),
        tighter in 0.01..1.0_f64,
    ) {
        let before = planned(&specified(&vms, 1.0));
        let after = planned(&specified(&vms, tighter));
        prop_assert!(left(&after) <= left(&before), "{} > {}", left(&after), left(&before));
        if !after.meets_all() {
            prop_assert!(left(&after) <= BY_HAND.get() as f64);
        }
    }
}
