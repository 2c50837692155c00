//! One cell: what was measured of a specification's VMs under a scheme, judged by the pass rule.

use std::time::Duration;

use rtvirtio_calibrate::load::{Measurement, TaskMeasurement, canary_summary};
use rtvirtio_cases::{Scale, SchemeSettings, judge};
use rtvirtio_planner::Predicted;
use rtvirtio_spec::latency::Quantile;
use rtvirtio_spec::run::{Canary, Cell, CellKey, MeasuredAt, Prediction, RUN_VERSION, TaskResult};
use rtvirtio_spec::specification::Specification;
use rtvirtio_units::Nanos;

/// A cell whose canary was later than this, times the testbed's scale, at its 99th percentile is
/// marked as disturbed: its tails may be the CPU's. Fixed before the first comparison.
pub(crate) const CANARY_LIMIT: Nanos = Nanos::from_millis(1);

/// A canary that was always so late; of what measured nothing, 0.
pub(crate) const fn canary_of(late: Nanos) -> Canary {
    Canary { n: 0, p50: late, p99: late, p999: late, max: late }
}

/// What a cell is judged against and labelled with.
pub struct CellContext<'a> {
    /// Which cell it is.
    pub key: CellKey,
    /// What the VMs do.
    pub specification: &'a Specification,
    /// What was set.
    pub scheme: &'a SchemeSettings,
    /// Predicts each task at a percentile, if the scheme predicts.
    pub predict: &'a dyn Fn(&Specification) -> Vec<Predicted>,
    /// Name of the device.
    pub device: String,
    /// Where its latencies are taken.
    pub measured_at: MeasuredAt,
    /// How slow the evaluation runs.
    pub scale: Scale,
    /// Length of each of its windows.
    pub window: Duration,
    /// When it started, RFC 3339.
    pub started: String,
}

impl CellContext<'_> {
    /// Judges the windows of a cell by the pass rule, all of them together. A tail's interval also
    /// spans what the windows show apart, since the machine's noise comes in spells.
    #[must_use]
    pub fn judge(&self, windows: Vec<Measurement>) -> Cell {
        let rounds = windows.len() as u32;
        let apart: Vec<Vec<TaskMeasurement>> = windows.iter().map(|w| w.tasks.clone()).collect();
        let mut length = self.window;
        let together = windows.into_iter().reduce(|mut all, window| {
            all.append(length, window, self.window);
            length += self.window;
            all
        });
        let Some(measurement) = together else { unreachable!("a cell has a window") };
        let window_s = length.as_secs_f64();
        let at_its_percentile = |judged: Quantile, measured: &TaskMeasurement| {
            let same = |t: &&TaskMeasurement| (&t.vm, &t.task) == (&measured.vm, &measured.task);
            let of_window = |tasks: &Vec<TaskMeasurement>| {
                let task = tasks.iter().find(same)?;
                Some(task.histogram.quantile(judged.percentile)?.value)
            };
            let values: Vec<Nanos> = apart.iter().filter_map(of_window).collect();
            Quantile {
                low: values.iter().copied().fold(judged.low, Nanos::min),
                high: values.iter().copied().fold(judged.high, Nanos::max),
                ..judged
            }
        };
        let mut judged_specification = self.specification.clone();
        let mut tasks = Vec::new();
        for vm in &mut judged_specification.vms {
            for task in &mut vm.tasks {
                let measured =
                    measurement.tasks.iter().find(|m| m.vm == vm.name && m.task == task.name);
                let (Some(measured), Some(target), Some(iops)) =
                    (measured, &mut task.target, task.load.iops)
                else {
                    continue;
                };
                let verdict = judge(&measured.histogram, window_s, iops, target.latency);
                if let Some(judged) = verdict.judged {
                    target.percentile = judged.percentile;
                }
                tasks.push(TaskResult {
                    vm: vm.name.clone(),
                    task: task.name.clone(),
                    measured_at: self.measured_at,
                    requested_iops: iops.get(),
                    delivered_iops: measured.histogram.count() as f64 / window_s,
                    judged: verdict.judged.map(|judged| at_its_percentile(judged, measured)),
                    target: Some(target.latency),
                    prediction: None,
                    passed: verdict.passed(),
                    histogram: measured.histogram.clone(),
                    timeline: measured.timeline.clone(),
                });
            }
        }
        // The prediction is for the percentile that could be judged; the model saw no result. It
        // knows nothing of I/O priorities.
        let predicts = self.scheme.ioprio.is_empty();
        for Predicted { promise, paper, paper_bound } in
            if predicts { (self.predict)(&judged_specification) } else { Vec::new() }
        {
            let found = tasks.iter_mut().find(|t| t.vm == promise.vm && t.task == promise.task);
            if let Some(task) = found {
                task.prediction = Some(Prediction {
                    percentile: promise.percentile,
                    predicted: promise.predicted,
                    bound: promise.bound,
                    paper,
                    paper_bound,
                });
            }
        }
        let limit = self.scale.time(CANARY_LIMIT);
        let canary = canary_summary(&measurement.canary);
        let late = canary.p99 > limit;
        Cell {
            version: RUN_VERSION,
            key: self.key.clone(),
            started: self.started.clone(),
            device: self.device.clone(),
            window_s,
            settings: self.scheme.settings.clone(),
            ioprio: self.scheme.ioprio.iter().map(|(v, p)| (v.clone(), p.to_string())).collect(),
            passed: !tasks.is_empty() && tasks.iter().all(|t| t.passed),
            attempts: 1,
            rounds,
            noise_floor: None,
            tasks,
            background: measurement.background,
            canary,
            machine: measurement.machine,
            disturbed: late.then(|| format!("canary p99 {} above {limit}", canary.p99)),
        }
    }
}
