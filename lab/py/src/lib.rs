//! `rtvirtio._core`: the simulator, the models and the planner for Python.
//!
//! Conversions only: what comes from Python goes through the same checked types as a file's text
//! (`convert`), and what goes back is plain dicts, lists and numbers. What they hold is typed in
//! python/rtvirtio/types.py; the documentation of each is its doc string.
//!
//! Terms: a *condition* is all that a simulation is a function of; a *load* is how the models see it.
//!
//! Properties (tests in python/tests/test_core.py): a wrong value is a `ValueError` that names the
//! field's path; nothing that is given makes it panic; other Python threads run while it simulates.

mod convert;
mod load;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    use std::collections::BTreeMap;

    use pyo3::exceptions::{PyIndexError, PyValueError};
    use pyo3::prelude::*;
    use pyo3::types::{PyDict, PyList, PyTuple};
    use rtvirtio_cases::{Case, IoPriority, Neighbour, Scale, Scheme, Tier};
    use rtvirtio_model::conformal;
    use rtvirtio_model::features::{self, FEATURES};
    use rtvirtio_model::learned::Learned;
    use rtvirtio_model::paper::{self, Reading, Sample};
    use rtvirtio_planner::{FoundDevice, Model};
    use rtvirtio_sim::path::{self, Condition, Priority};
    use rtvirtio_spec::profile::{PaperFit, Profile};
    use rtvirtio_spec::settings::{DeviceSettings, Knobs, Settings, knob_list};
    use rtvirtio_spec::specification::{Device, Specification, parse, to_toml};
    use rtvirtio_ssd::SsdConfig;
    use rtvirtio_units::{BytesPerSecond, Confidence, DeviceName, Iops, Nanos, Percentile, VmName};
    use serde::Deserialize;

    use crate::convert::{from_python, refused, to_python};
    use crate::load::{Rest, condition_of, device_load, guest_bfq};

    /// What a condition's device is called in a specification made of a case.
    const DEVICE: &str = "scratch";

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("FEATURES", PyTuple::new(module.py(), FEATURES)?)
    }

    /// A reference device by its name, such as ref-4x250; NAME*N is one that is N times slower.
    #[pyfunction]
    fn device<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let config: SsdConfig = name.parse().map_err(refused)?;
        to_python(py, &config)
    }

    /// How long a condition is simulated if each task delivers its rate, ns: with the warm-up, and the time before it in which
    /// tasks start.
    #[pyfunction]
    fn expected_ns(condition: &Bound<'_, PyAny>) -> PyResult<u64> {
        Ok(checked(condition)?.expected().get())
    }

    fn checked(condition: &Bound<'_, PyAny>) -> PyResult<Condition> {
        let condition: Condition = from_python(condition)?;
        condition.check().map_err(refused)?;
        Ok(condition)
    }

    /// What a condition gives. Deterministic: the seed is in the condition.
    #[pyfunction]
    fn simulate<'py>(
        py: Python<'py>,
        condition: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let condition: Condition = from_python(condition)?;
        let outcome = py.detach(|| path::run(&condition)).map_err(refused)?;
        to_python(py, &outcome)
    }

    /// What a learned model is asked of (VM, task, percentile): rows in the order of FEATURES.
    #[pyfunction]
    #[pyo3(name = "features")]
    fn features_of(
        condition: &Bound<'_, PyAny>,
        asked: Vec<(usize, usize, f64)>,
    ) -> PyResult<Vec<Vec<f64>>> {
        let condition = checked(condition)?;
        let load = device_load(&condition);
        let row = |(vm, task, percentile): (usize, usize, f64)| {
            let percentile = Percentile::new(percentile).map_err(refused)?;
            let Some(owner) = condition.vms.get(vm).filter(|v| task < v.tasks.len()) else {
                return Err(PyIndexError::new_err(format!("vms[{vm}].tasks[{task}] is not there")));
            };
            Ok(features::features(&load, guest_bfq(owner), vm, task, percentile).to_vec())
        };
        asked.into_iter().map(row).collect()
    }

    /// What dominates the tails under a load, by its features.
    #[pyfunction]
    fn regime<'py>(
        py: Python<'py>,
        features: [f64; FEATURES.len()],
    ) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &features::regime(&features))
    }

    /// The paper's lambdas by least squares on tails: for each condition, (VM, ns) of each task measured.
    #[pyfunction]
    #[pyo3(signature = (conditions, tails, throughput, reading = "corrected"))]
    fn paper_fit<'py>(
        py: Python<'py>,
        conditions: &Bound<'py, PyList>,
        tails: Vec<Vec<(usize, u64)>>,
        throughput: u64,
        reading: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let reading = read(reading)?;
        if conditions.len() != tails.len() {
            let words = format!("{} conditions, and tails of {}", conditions.len(), tails.len());
            return Err(PyValueError::new_err(words));
        }
        let mut samples = Vec::new();
        for (condition, tails) in conditions.iter().zip(&tails) {
            let load = device_load(&checked(&condition)?);
            for &(vm, tail) in tails {
                if vm >= load.vms.len() {
                    return Err(PyIndexError::new_err(format!("vms[{vm}] is not there")));
                }
                samples.push(Sample { load: load.clone(), vm, tail: Nanos::new(tail) });
            }
        }
        let throughput = BytesPerSecond::new(throughput);
        to_python(py, &py.detach(|| paper::fit(&samples, throughput, reading)))
    }

    /// The paper's host part of each VM's tail, ns.
    #[pyfunction]
    #[pyo3(signature = (fit, conditions, reading = "corrected"))]
    fn paper_tails(
        fit: &Bound<'_, PyAny>,
        conditions: &Bound<'_, PyList>,
        reading: &str,
    ) -> PyResult<Vec<Vec<u64>>> {
        let fit: PaperFit = from_python(fit)?;
        let reading = read(reading)?;
        let of = |condition: Bound<'_, PyAny>| {
            let load = device_load(&checked(&condition)?);
            let tail = |vm| paper::host_part(&fit, &load, vm, reading).get();
            Ok((0..load.vms.len()).map(tail).collect())
        };
        conditions.iter().map(of).collect()
    }

    /// What a learned model's ONNX file predicts for rows of FEATURES, as the planner reads it: the tail and what the
    /// file's scores refer to, ns.
    #[pyfunction]
    fn learned_tails(
        py: Python<'_>,
        onnx: &[u8],
        rows: Vec<[f64; FEATURES.len()]>,
    ) -> PyResult<Vec<(u64, u64)>> {
        let model = py.detach(|| Learned::from_bytes(onnx)).map_err(refused)?;
        let said = |row| model.predict(row).map(|p| (p.tail.get(), p.high.get())).map_err(refused);
        py.detach(|| rows.iter().map(said).collect())
    }

    /// What a bound adds to a prediction at `confidence`, by scores: the logarithm of the factor, or None if
    /// there are too few.
    #[pyfunction]
    #[pyo3(name = "conformal")]
    fn conformal_score(mut scores: Vec<f64>, confidence: f64) -> PyResult<Option<f64>> {
        let confidence = Confidence::new(confidence).map_err(refused)?;
        scores.sort_by(f64::total_cmp);
        Ok(conformal::factor(&scores, confidence).map(f64::ln))
    }

    /// Table III's lambdas with Table I's T_agg.
    #[pyfunction]
    fn table_iii(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        to_python(py, &paper::TABLE_III)
    }

    /// One of the 24 cases, such as 4xL+M+H, as a specification (TOML) on device `scratch`.
    #[pyfunction]
    #[pyo3(signature = (name, tier = "strict", neighbour = "none", window_ns = 30_000_000_000))]
    fn case(name: &str, tier: &str, neighbour: &str, window_ns: u64) -> PyResult<String> {
        let case: Case = name.parse().map_err(refused)?;
        let tier: Tier = tier.parse().map_err(refused)?;
        let neighbour: Neighbour = neighbour.parse().map_err(refused)?;
        let device = Device {
            name: DeviceName::new(DEVICE).map_err(refused)?,
            path: "/dev/scratch".into(),
            profile: "scratch.json".into(),
        };
        let window = Nanos::new(window_ns);
        let root = std::path::Path::new("rtvirtio");
        let made =
            rtvirtio_cases::specification(case, tier, neighbour, window, device, root, Scale::ONE);
        Ok(to_toml(&made))
    }

    /// What a compared scheme sets for a specification (TOML) on devices of `iops_4k` requests of 4 KiB a
    /// second: the settings, and priorities of VMs' processes. Those of `rtvirtio` are a plan's.
    #[pyfunction]
    fn scheme<'py>(
        py: Python<'py>,
        name: &str,
        specification: &str,
        iops_4k: f64,
    ) -> PyResult<Bound<'py, PyDict>> {
        let scheme: Scheme = name.parse().map_err(refused)?;
        let specification = specify(specification)?;
        let capacity = Iops::new(iops_4k).map_err(refused)?;
        let Some(set) = scheme.baseline_settings(&specification, capacity, Scale::ONE) else {
            return Err(PyValueError::new_err("rtvirtio's settings are a plan's"));
        };
        let priorities: BTreeMap<VmName, Priority> = set
            .ioprio
            .into_iter()
            .map(|(vm, priority)| match priority {
                IoPriority::RealTime(level) => (vm, Priority::RealTime(level)),
                IoPriority::BestEffort(level) => (vm, Priority::BestEffort(level)),
            })
            .collect();
        let made = PyDict::new(py);
        made.set_item("settings", to_python(py, &set.settings)?)?;
        made.set_item("priorities", to_python(py, &priorities)?)?;
        Ok(made)
    }

    /// The plan for a specification (TOML). Each device is what its profile is of; `observed` is
    /// a plan's, [] by default: all knobs change. It is planned by `model`, structural or analytical (the
    /// paper's), or by a learned one's file, `onnx`.
    #[pyfunction]
    #[pyo3(signature = (specification, profiles, observed = None, onnx = None, model = "structural"))]
    fn plan<'py>(
        py: Python<'py>,
        specification: &str,
        profiles: &Bound<'py, PyDict>,
        observed: Option<&Bound<'py, PyAny>>,
        onnx: Option<&[u8]>,
        model: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let specification = specify(specification)?;
        let profiles = read_profiles(profiles)?;
        let observed = match observed {
            Some(list) => from_python::<ObservedKnobs>(list)?.0,
            None => Knobs::new(),
        };
        let learned = onnx.map(Learned::from_bytes).transpose().map_err(refused)?;
        let found = found(&profiles, model_of(model, learned.as_ref())?);
        let plan = py
            .detach(|| rtvirtio_planner::plan(&specification, &found, &observed))
            .map_err(refused)?;
        to_python(py, &plan)
    }

    /// What the models say of each task with a target under `settings`, a plan's or one's own.
    #[pyfunction]
    #[pyo3(signature = (specification, profiles, settings, onnx = None))]
    fn predict<'py>(
        py: Python<'py>,
        specification: &str,
        profiles: &Bound<'py, PyDict>,
        settings: &Bound<'py, PyAny>,
        onnx: Option<&[u8]>,
    ) -> PyResult<Bound<'py, PyList>> {
        let specification = specify(specification)?;
        let profiles = read_profiles(profiles)?;
        let settings: Settings = from_python(settings)?;
        let learned = onnx.map(Learned::from_bytes).transpose().map_err(refused)?;
        let found = found(&profiles, learned.as_ref().map_or(Model::Structural, Model::Learned));
        let predicted = py
            .detach(|| rtvirtio_planner::predict(&specification, &found, &settings))
            .map_err(refused)?;
        let list = PyList::empty(py);
        for p in predicted {
            let row = to_python(py, &p.promise)?;
            row.set_item("paper", p.paper.map(Nanos::get))?;
            row.set_item("paper_bound", p.paper_bound.map(Nanos::get))?;
            list.append(row)?;
        }
        Ok(list)
    }

    /// The VMs of a specification on device `name` under `settings`, with `priorities`, to be simulated on
    /// `device`; behind the data plane's schedule instead of the kernel's if so told.
    #[pyfunction]
    #[pyo3(signature = (specification, settings, name, device, length, seed = 1, warm_up_ns = 1_000_000_000,
        nesting = 1, transport_ns = 0, software_ns = 0, priorities = None, data_plane = false))]
    #[expect(clippy::too_many_arguments, reason = "named in Python")]
    fn condition<'py>(
        py: Python<'py>,
        specification: &str,
        settings: &Bound<'py, PyAny>,
        name: &str,
        device: &Bound<'py, PyAny>,
        length: &Bound<'py, PyAny>,
        seed: u64,
        warm_up_ns: u64,
        nesting: u8,
        transport_ns: u64,
        software_ns: u64,
        priorities: Option<&Bound<'py, PyAny>>,
        data_plane: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let specification = specify(specification)?;
        let settings: DeviceSettings = from_python(settings)?;
        let name = DeviceName::new(name).map_err(refused)?;
        let rest = Rest {
            device: from_python(device)?,
            data_plane,
            priorities: priorities.map(from_python).transpose()?.unwrap_or_default(),
            nesting,
            transport: Nanos::new(transport_ns),
            software: Nanos::new(software_ns),
            warm_up: Nanos::new(warm_up_ns),
            length: from_python(length)?,
            seed,
        };
        let made = condition_of(&specification, &settings, &name, rest);
        made.check().map_err(refused)?;
        to_python(py, &made)
    }

    #[derive(Deserialize)]
    struct ObservedKnobs(#[serde(with = "knob_list")] Knobs);

    fn specify(text: &str) -> PyResult<Specification> {
        parse("specification", text).map_err(refused)
    }

    fn read(reading: &str) -> PyResult<Reading> {
        match reading {
            "corrected" => Ok(Reading::Corrected),
            "printed" => Ok(Reading::Printed),
            _ => Err(PyValueError::new_err(format!(
                "reading: {reading:?} is neither \"corrected\" nor \"printed\""
            ))),
        }
    }

    fn model_of<'a>(name: &str, learned: Option<&'a Learned>) -> PyResult<Model<'a>> {
        match (name, learned) {
            ("structural", Some(learned)) => Ok(Model::Learned(learned)),
            ("structural", None) => Ok(Model::Structural),
            ("analytical", None) => Ok(Model::Analytical),
            ("analytical", Some(_)) => {
                Err(PyValueError::new_err("model and onnx: one of them is the model"))
            }
            _ => Err(PyValueError::new_err(format!(
                "model: {name:?} is neither \"structural\" nor \"analytical\""
            ))),
        }
    }

    fn read_profiles(profiles: &Bound<'_, PyDict>) -> PyResult<BTreeMap<DeviceName, Profile>> {
        let read = |(name, profile): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            let name = DeviceName::new(name.extract::<String>()?).map_err(refused)?;
            Ok((name, from_python(&profile)?))
        };
        profiles.iter().map(read).collect()
    }

    /// Offline, a profile's own device is the one that is there.
    fn found<'a>(
        profiles: &'a BTreeMap<DeviceName, Profile>,
        model: Model<'a>,
    ) -> BTreeMap<DeviceName, FoundDevice<'a>> {
        let device = |profile: &'a Profile| {
            let identity = profile.device.clone();
            FoundDevice { profile, identity, model, schedulers: None }
        };
        profiles.iter().map(|(name, profile)| (name.clone(), device(profile))).collect()
    }
}
