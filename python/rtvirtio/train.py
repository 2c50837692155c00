"""Models learned from a campaign, and how wrong they are on conditions that they have not seen.

- `mlp`: the paper's network, 3 hidden layers of 15 ReLU neurons, squared error; 5-fold cross-validation,
  whose five networks' predictions are averaged.
- `mlp-over`: the same, where an underestimate weighs more: the paper's preference for overestimates.
- `boosting`: gradient boosting of the median, the modern rival; `boosting-95`: of the 95 % quantile.
- `paper`: the paper's analytical model, refit by `rtvirtio_model::paper`, as the baseline.

A row is one task at one percentile that has ten samples beyond it. The target is the decimal
logarithm of the tail in seconds, so that errors are relative. Rows of one condition belong together: all
are for training (80 %), for conformal scores (10 %) or for the test (10 %), by the condition's id; folds
are cut between conditions too. Errors are of the test's rows at the judged percentile.

Conditions that were measured for real (`rows_of_cells`) judge the models as well: in each of five folds
they are trained on simulated rows and, with as much weight, on three fifths of the real conditions, their
bounds are calibrated on a fifth and judged on the last, so that each real condition is judged once.

The bounds are MAPIE's split conformal ones, with signed scores, of which the upper end is used: each end of
an interval of 90 % is missed by 5 %. Task-rows of one condition are not independent, so coverage is
measured on the test rather than taken on trust.
"""

import json
import tomllib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from mapie.conformity_scores import AbsoluteConformityScore
from mapie.regression import SplitConformalRegressor
from onnx import TensorProto, helper, numpy_helper
from scipy.linalg import block_diag
from skl2onnx import convert_sklearn
from skl2onnx.common.data_types import FloatTensorType
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GroupKFold
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from rtvirtio import _core
from rtvirtio.types import Condition, Length, PaperFit, Profile

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

#: The paper's network.
NEURONS, LAYERS, FOLDS = 15, 3, 5
#: Rows that a network sees in training, all passes together; and the fewest and most passes.
VISITS, PASSES = 2_000_000, (60, 400)
#: How many times an underestimate weighs in `mlp-over`, and how often the weights are set anew.
OVER, ROUNDS = 4.0, 3
CONFIDENCE = 0.95
#: Samples beyond a percentile that make it one to learn from.
BEYOND = 10
#: Of the size study: rows, and what is tried.
STUDY_ROWS, STUDY_NEURONS, STUDY_LAYERS = 20_000, range(1, 21), (1, 2, 3, 4)

_COLUMNS = ((99.0, "p99_ns"), (99.9, "p999_ns"), (99.99, "p9999_ns"))


class Regressor(Protocol):
    """What scikit-learn calls a fitted regressor."""

    def predict(self, x: Floats) -> Floats:
        """The output for each row."""


@dataclass(frozen=True)
class Rows:
    """Rows to learn from, or to be judged by."""

    conditions: list[Condition]
    #: Of each row: its condition's place above, its VM and task there.
    condition: Indices
    vm: Indices
    task: Indices
    percentile: Floats
    judged: npt.NDArray[np.bool_]
    features: Floats
    #: log10 of the tail in seconds.
    tail: Floats
    regime: npt.NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.tail)

    def take(self, where: npt.NDArray[Any]) -> "Rows":
        """Those rows: a mask, or places."""
        columns = {name: getattr(self, name)[where] for name in _ROW_COLUMNS}
        return Rows(self.conditions, **columns)

    def joined(self, other: "Rows") -> "Rows":
        """These rows and those."""
        columns = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in _ROW_COLUMNS}
        columns["condition"][len(self) :] += len(self.conditions)
        return Rows(self.conditions + other.conditions, **columns)

    def part(self, *tenths: int) -> "Rows":
        """The rows of those tenths of all conditions."""
        from rtvirtio.grid import condition_id

        tenth = np.array([int(condition_id(c)[:8], 16) % 10 for c in self.conditions])
        return self.take(np.isin(tenth[self.condition], tenths))


_ROW_COLUMNS = [field.name for field in fields(Rows) if field.name != "conditions"]
TEST, CALIBRATION, TRAINING = (0,), (1,), (2, 3, 4, 5, 6, 7, 8, 9)

#: A task's tail: VM, task, percentile, whether it is the judged one, s.
Tail = tuple[int, int, float, bool, float]


def rows(table: pa.Table) -> Rows:
    """A campaign's rows: each task with a rate, at each percentile with ten samples beyond it."""
    by_id: dict[str, list[dict[str, Any]]] = {}
    columns = ["id", "vm", "task", "condition", "requested_iops", "n", "percentile"]
    for row in table.select([*columns, *(name for _, name in _COLUMNS)]).to_pylist():
        if row["requested_iops"] is not None:
            by_id.setdefault(row["id"], []).append(row)

    def found() -> Iterable[tuple[Condition, list[Tail]]]:
        for of_condition in by_id.values():
            tails: list[Tail] = []
            for row in of_condition:
                for percentile, column in _COLUMNS:
                    beyond = int(row["n"] * (1 - percentile / 100) + 1e-6)
                    if beyond >= BEYOND and row[column]:
                        judged = percentile == row["percentile"]
                        tails.append((row["vm"], row["task"], percentile, judged, row[column] / 1e9))
            yield json.loads(of_condition[0]["condition"]), tails

    return _rows(found())


def rows_of_cells(cells: Iterable[dict[str, Any]]) -> Rows:
    """Cells of `rtvirtio bench` that count: each task with a rate, at its judged percentile."""

    def found() -> Iterable[tuple[Condition, list[Tail]]]:
        for cell in cells:
            if cell["discarded"] is not None:
                continue
            key = cell["key"]
            window = round(cell["window_s"] * 1e9)
            specification = _core.case(key["case"], key["tier"], key["neighbour"], window)
            [(name, settings)] = cell["settings"].items()
            length: Length = {"at_least": window, "at_most": window}
            condition = _core.condition(
                specification, settings, name, _core.device(cell["device"]), length, key["repetition"]
            )
            places = {
                (vm["name"], task["name"]): (i, j)
                for i, vm in enumerate(tomllib.loads(specification)["vm"])
                for j, task in enumerate(vm.get("task", []))
            }
            tails: list[Tail] = []
            for task in cell["tasks"]:
                if (judged := task["judged"]) is not None:
                    vm, number = places[task["vm"], task["task"]]
                    tails.append((vm, number, judged["percentile"], True, judged["value"] / 1e9))
            yield condition, tails

    return _rows(found())


def _rows(found: Iterable[tuple[Condition, list[Tail]]]) -> Rows:
    conditions: list[Condition] = []
    places: list[tuple[int, int, int, float, bool, float]] = []
    features: list[list[float]] = []
    for condition, tails in found:
        for vm, task, percentile, judged, seconds in tails:
            places.append((len(conditions), vm, task, percentile, judged, np.log10(seconds)))
        features += _core.features(condition, [(vm, task, percentile) for vm, task, percentile, *_ in tails])
        conditions.append(condition)
    if not places:
        raise ValueError("no task has ten samples beyond its p99")
    condition_, vm_, task_, percentile_, judged_, tail_ = zip(*places, strict=True)
    return Rows(
        conditions,
        np.array(condition_, dtype=np.intp),
        np.array(vm_, dtype=np.intp),
        np.array(task_, dtype=np.intp),
        np.array(percentile_, dtype=np.float64),
        np.array(judged_, dtype=np.bool_),
        np.array(features, dtype=np.float64),
        np.array(tail_, dtype=np.float64),
        np.array([_core.regime(f) for f in features]),
    )


class Ensemble(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Networks on the same scaled features, averaged."""

    #: Where MAPIE looks whether it is.
    is_fitted = True

    def __init__(self, scaler: StandardScaler, members: list[MLPRegressor]) -> None:
        self.scaler = scaler
        self.members = members

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def fit(self, x: Floats, y: Floats) -> "Ensemble":
        """It is fitted already (MAPIE asks that the method be there)."""
        return self

    def predict(self, x: Floats) -> Floats:
        """Their mean."""
        scaled = self.scaler.transform(x)
        return np.asarray(np.mean([m.predict(scaled) for m in self.members], axis=0))

    def onnx(self) -> onnx.ModelProto:
        """One network that says the same: scaling is in its first layer's weights, the members are
        blocks of its matrices, their mean is in its last.
        """
        mean, scale = self.scaler.mean_, self.scaler.scale_
        weights, biases = [], []
        depth = len(self.members[0].coefs_)
        for layer in range(depth):
            w = [m.coefs_[layer] for m in self.members]
            b = [m.intercepts_[layer] for m in self.members]
            if layer == 0:
                b = [b - (mean / scale) @ w for w, b in zip(w, b, strict=True)]
                weight = np.hstack([w / scale[:, None] for w in w])
            elif layer < depth - 1:
                weight = block_diag(*w)
            else:
                weight, b = np.vstack(w) / len(w), [np.mean(b, axis=0)]
            weights.append(weight.astype(np.float32))
            biases.append(np.concatenate(b).astype(np.float32))
        nodes, tensors, value = [], [], "features"
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            names = [f"w{layer}", f"b{layer}"]
            tensors += [
                numpy_helper.from_array(weight, names[0]),
                numpy_helper.from_array(bias, names[1]),
            ]
            last = layer == depth - 1
            made = "tail" if last else f"z{layer}"
            nodes.append(helper.make_node("Gemm", [value, *names], [made]))
            if not last:
                value = f"a{layer}"
                nodes.append(helper.make_node("Relu", [made], [value]))
        floats = TensorProto.FLOAT
        graph = helper.make_graph(
            nodes,
            "ensemble",
            [helper.make_tensor_value_info("features", floats, [None, len(mean)])],
            [helper.make_tensor_value_info("tail", floats, [None, 1])],
            tensors,
        )
        # Versions that every reader of the last years knows.
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8, producer_name="rtvirtio"
        )


def network(rows: int, neurons: int = NEURONS, layers: int = LAYERS, seed: int = 1) -> MLPRegressor:
    """A network of the paper's kind, to be trained on so many rows."""
    return MLPRegressor(
        hidden_layer_sizes=(neurons,) * layers,
        activation="relu",
        random_state=seed,
        max_iter=int(np.clip(VISITS / rows, *PASSES)),
        tol=1e-5,
    )


def _fit(model: MLPRegressor, x: Floats, y: Floats, weight: Floats | None = None) -> None:
    with warnings.catch_warnings():
        # A fixed number of passes is what is meant.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x, y, sample_weight=weight)


def ensemble(data: Rows, over: float = 1.0, seed: int = 1) -> tuple[Ensemble, list[float]]:
    """The paper's model, and the MSE of each fold's network on the fold that it has not seen.

    With ``over`` above 1 an underestimate weighs so many times: each network is trained on with
    weights by the sign of its own errors (expectile regression by reweighting).
    """
    scaler = StandardScaler().fit(data.features)
    x, y = scaler.transform(data.features), data.tail
    members, losses = [], []
    folds = GroupKFold(FOLDS).split(x, y, data.condition)
    for number, (train, held_out) in enumerate(folds):
        member = network(len(train), seed=seed + number)
        _fit(member, x[train], y[train])
        if over > 1.0:
            member.set_params(warm_start=True, max_iter=20)
            for _ in range(ROUNDS):
                weight = np.where(y[train] > member.predict(x[train]), over, 1.0)
                _fit(member, x[train], y[train], weight / weight.mean())
        members.append(member)
        losses.append(float(np.mean((member.predict(x[held_out]) - y[held_out]) ** 2)))
    return Ensemble(scaler, members), losses


def boosting(data: Rows, quantile: float, seed: int = 1) -> HistGradientBoostingRegressor:
    """Gradient boosting of a quantile."""
    model = HistGradientBoostingRegressor(
        loss="quantile", quantile=quantile, max_iter=300, learning_rate=0.1, random_state=seed,
        early_stopping=False,
    )  # fmt: skip
    return model.fit(data.features, data.tail)


class Paper:
    """The paper's model with λ refit, for rows rather than features: it needs the whole load."""

    def __init__(self, data: Rows, throughput: int) -> None:
        of_condition: dict[int, list[tuple[int, int]]] = {}
        judged = data.take(data.judged & np.char.startswith(data.regime, "idling"))
        for condition, vm, tail in zip(judged.condition, judged.vm, judged.tail, strict=True):
            of_condition.setdefault(int(condition), []).append((int(vm), round(10**tail * 1e9)))
        conditions = [data.conditions[place] for place in of_condition]
        tails = list(of_condition.values())
        self.fit: PaperFit = _core.paper_fit(conditions, tails, throughput)

    def predict(self, data: Rows) -> Floats:
        """log10 s; NaN where bfq does not idle, of which the paper's model does not speak."""
        used = np.unique(data.condition)
        of_vms = _core.paper_tails(self.fit, [data.conditions[place] for place in used])
        by_place = dict(zip(used.tolist(), of_vms, strict=True))
        pairs = zip(data.condition.tolist(), data.vm.tolist(), strict=True)
        tails = np.array([by_place[place][vm] for place, vm in pairs], dtype=np.float64)
        idling = np.char.startswith(data.regime, "idling")
        return np.where(idling, np.log10(np.maximum(tails, 1.0) / 1e9), np.nan)


def errors(measured: Floats, predicted: Floats) -> dict[str, float]:
    """How wrong predictions are: log10 s in, ms and ratios out. An error is measured − predicted, as
    the paper's: a negative one is an overestimate.
    """
    there = np.isfinite(predicted)
    y, p = measured[there], predicted[there]
    if not len(y):
        return {"rows": 0}
    ms = 1000 * (10**y - 10**p)
    ratio = np.log(10) * np.abs(y - p)
    return {
        "rows": len(y),
        "log10_mse": float(np.mean((y - p) ** 2)),
        "mae_ms": float(np.mean(np.abs(ms))),
        "rmse_ms": float(np.sqrt(np.mean(ms**2))),
        "median_error_ms": float(np.median(ms)),
        "median_factor": float(np.exp(np.median(ratio))),
        "p90_factor": float(np.exp(np.quantile(ratio, 0.9))),
        "underestimated": float(np.mean(y > p)),
    }


def bounds(model: Regressor, calibration: Rows, test: Rows) -> Floats:
    """MAPIE's one-sided bound for each row of ``test``, log10 s."""
    mapie = SplitConformalRegressor(
        model,
        # Of a two-sided interval with signed scores each end is missed by half.
        confidence_level=2 * CONFIDENCE - 1,
        conformity_score=AbsoluteConformityScore(sym=False),
        prefit=True,
    )
    mapie.conformalize(calibration.features, calibration.tail)
    _, interval = mapie.predict_interval(test.features)
    return np.asarray(interval[:, 1, 0])


def covered(bound: Floats, test: Rows) -> dict[str, float]:
    """How bounds held, and how far they are above what was measured."""
    return {
        "confidence": CONFIDENCE,
        "rows": len(test),
        "held": float(np.mean(test.tail <= bound)),
        "median_bound_over_measured": float(np.median(10 ** (bound - test.tail))),
    }


def conformal(model: Regressor, calibration: Rows, test: Rows) -> dict[str, float]:
    """How bounds hold on rows at the judged percentile."""
    calibration, test = calibration.take(calibration.judged), test.take(test.judged)
    return covered(bounds(model, calibration, test), test)


def on_real(
    real: Rows, simulated: Rows, throughput: int, seed: int, say: Callable[[str], object]
) -> tuple[dict[str, Any], pa.Table]:
    """Models on real conditions that they have not seen: errors, bounds, predictions."""
    rng = np.random.default_rng(seed)
    kept = rng.permutation(len(simulated))[:STUDY_ROWS]
    simulated = simulated.take(np.sort(kept))
    # Repetitions of one condition have one fold.
    names = [json.dumps({**c, "seed": 0}, sort_keys=True) for c in real.conditions]
    distinct = {name: place for place, name in enumerate(dict.fromkeys(names))}
    order = rng.permutation(len(distinct))
    fold = np.array([order[distinct[name]] % FOLDS for name in names])[real.condition]
    models = ("mlp", "mlp-over", "boosting")
    predicted = {name: np.full(len(real), np.nan) for name in ("paper", *models)}
    bound = {name: np.full(len(real), np.nan) for name in models}
    for number in range(FOLDS):
        test, calibrated = fold == number, fold == (number + 1) % FOLDS
        training = real.take(~test & ~calibrated)
        paper = Paper(training, throughput)
        predicted["paper"][test] = paper.predict(real.take(test))
        times = max(1, round(len(simulated) / len(training)))
        both = simulated.joined(training.take(np.tile(np.arange(len(training)), times)))
        made: dict[str, Regressor] = {
            "mlp": ensemble(both, seed=seed)[0],
            "mlp-over": ensemble(both, OVER, seed)[0],
            "boosting": boosting(both, 0.5, seed),
        }
        for name, model in made.items():
            predicted[name][test] = model.predict(real.features[test])
            bound[name][test] = bounds(model, real.take(calibrated), real.take(test))
        say(f"real conditions: fold {number + 1} of {FOLDS} done")
    spoken = np.isfinite(predicted["paper"])
    result = {
        "conditions": len(distinct),
        "errors": {name: errors(real.tail, values) for name, values in predicted.items()},
        # Where the paper's model speaks.
        "errors_idling": {name: errors(real.tail[spoken], v[spoken]) for name, v in predicted.items()},
        "bounds": {name: covered(values, real) for name, values in bound.items()},
    }
    return result, _predictions(real, predicted)


def describe(model: Regressor, training: Rows, calibration: Rows, profile: Profile) -> str:
    """The description in an ONNX file (docs/learned-models.md): JSON."""
    judged = calibration.take(calibration.judged)
    score = np.log(10) * (judged.tail - model.predict(judged.features))
    scores = {
        str(regime): sorted(score[judged.regime == regime].tolist()) for regime in np.unique(judged.regime)
    }
    most = 100_000 // max(1, len(scores))
    capacity = profile["capacity"]
    assert isinstance(capacity, dict)
    return json.dumps(
        {
            "version": 1,
            "features": list(_core.FEATURES),
            "minimum": training.features.min(axis=0).tolist(),
            "maximum": training.features.max(axis=0).tolist(),
            "output": "log10_s",
            "scores": {regime: _thinned(values, most) for regime, values in scores.items()},
            "device": profile["device"],
            "write_throughput": capacity["write_throughput"],
        }
    )


def _thinned(values: list[float], most: int) -> list[float]:
    """At most so many of sorted values, evenly spaced, the greatest among them."""
    if len(values) <= most:
        return values
    return [values[-1 - i * len(values) // most] for i in range(most)][::-1]


def export(model: Ensemble | HistGradientBoostingRegressor, description: str) -> bytes:
    """An ONNX file of `rtvirtio plan --model`."""
    if isinstance(model, Ensemble):
        made = model.onnx()
    else:
        inputs = [("features", FloatTensorType([None, len(_core.FEATURES)]))]
        made = convert_sklearn(model, initial_types=inputs, target_opset=13)
    helper.set_model_props(made, {"rtvirtio": description})
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString())


def study(data: Rows, say: Callable[[str], object], rows: int = STUDY_ROWS) -> list[dict[str, Any]]:
    """Fig. 3: MSE of a network against its size, on conditions that it has not seen."""
    scaler = StandardScaler().fit(data.features)
    keep = np.unique(data.condition)
    keep = keep[: max(10, round(len(keep) * rows / len(data)))]
    part = data.take(np.isin(data.condition, keep))
    x, y = scaler.transform(part.features), part.tail
    train, held_out = next(iter(GroupKFold(FOLDS).split(x, y, part.condition)))
    found = []
    for layers in STUDY_LAYERS:
        for neurons in STUDY_NEURONS:
            model = network(len(train), neurons, layers)
            _fit(model, x[train], y[train])
            found.append(
                {
                    "layers": layers,
                    "neurons": neurons,
                    "training": float(np.mean((model.predict(x[train]) - y[train]) ** 2)),
                    "validation": float(np.mean((model.predict(x[held_out]) - y[held_out]) ** 2)),
                }
            )
        say(f"size study: {layers} layers done")
    return found


def _predictions(data: Rows, predicted: dict[str, Floats]) -> pa.Table:
    ms = {f"{name}_ms": 1000 * 10**values for name, values in predicted.items()}
    from rtvirtio.grid import condition_id

    ids = [condition_id(condition) for condition in data.conditions]
    return pa.table(
        {
            "id": [ids[place] for place in data.condition],
            "vm": data.vm,
            "task": data.task,
            "percentile": data.percentile,
            "regime": data.regime.tolist(),
            "measured_ms": 1000 * 10**data.tail,
            **ms,
        }
    )


# A thread of OpenMP that waits for another spins: on a busy machine two are 100 times slower than one.
@threadpool_limits.wrap(limits=1)  # type: ignore[untyped-decorator]
def train(
    table: pa.Table,
    out: Path,
    *,
    profile: Profile | None = None,
    throughput: int = 363_000_000,
    shown: pa.Table | None = None,
    cells: list[dict[str, Any]] | None = None,
    sizes: bool = False,
    seed: int = 1,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Trains all models, writes `training.json`, `predictions.parquet` and, with a profile of the device,
    ONNX files to ``out``; with ``shown`` (the grid `figures`) its predictions too, with ``cells`` how the
    models do on real conditions. Gives back the JSON.
    """
    out.mkdir(parents=True, exist_ok=True)
    data = rows(table)
    training, calibration, test = (data.part(*p) for p in (TRAINING, CALIBRATION, TEST))
    if not (len(training) and calibration.judged.any() and test.judged.any()):
        raise ValueError(
            f"{len(data.conditions)} conditions are too few: a tenth must be left for the test and "
            "one for the bounds"
        )
    if profile is not None:
        throughput = int(profile["capacity"]["write_throughput"])  # type: ignore[index]
    say(
        f"{len(data.conditions):,} conditions, {len(data):,} rows: {len(training):,} to train, "
        f"{len(calibration):,} for bounds, {len(test):,} to test"
    )
    paper = Paper(training, throughput)
    say("paper: refit")
    mlp, folds = ensemble(training, seed=seed)
    say("mlp: trained")
    mlp_over, folds_over = ensemble(training, OVER, seed)
    say("mlp-over: trained")
    models: dict[str, Any] = {
        "mlp": mlp,
        "mlp-over": mlp_over,
        "boosting": boosting(training, 0.5, seed),
        "boosting-95": boosting(training, CONFIDENCE, seed),
    }
    say("boosting: trained")

    judged = test.take(test.judged)

    def predict(data: Rows) -> dict[str, Floats]:
        learned = {name: model.predict(data.features) for name, model in models.items()}
        return {"paper": paper.predict(data), **learned}

    predicted = predict(judged)
    pq.write_table(_predictions(judged, predicted), out / "predictions.parquet")
    if shown is not None:
        of_shown = rows(shown)
        of_shown = of_shown.take(of_shown.judged)
        pq.write_table(_predictions(of_shown, predict(of_shown)), out / "shown.parquet")
    result: dict[str, Any] = {
        "version": _core.__version__,
        "conditions": len(data.conditions),
        "rows": {"training": len(training), "calibration": len(calibration), "test": len(test)},
        "seed": seed,
        "paper": {"table_iii": _core.table_iii(), "refit": paper.fit},
        "folds_mse": {"mlp": folds, "mlp-over": folds_over},
        "errors": {name: errors(judged.tail, values) for name, values in predicted.items()},
        "bounds": {name: conformal(model, calibration, test) for name, model in models.items()},
        "sizes": study(training, say) if sizes else None,
        "real": None,
    }
    if cells is not None:
        result["real"], found = on_real(rows_of_cells(cells), training, throughput, seed, say)
        pq.write_table(found, out / "real.parquet")
    if profile is None:
        say("no profile of the device: no ONNX file is written (--profile)")
    else:
        for name, model in models.items():
            description = describe(model, training, calibration, profile)
            (out / f"{name}.onnx").write_bytes(export(model, description))
    (out / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    return result
