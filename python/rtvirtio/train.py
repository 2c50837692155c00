"""Models learned from a campaign, and how wrong they are on conditions that they have not seen.

- `mlp`: the paper's network, 3 hidden layers of 15 ReLU neurons, squared error; 5-fold cross-validation,
  whose five networks' predictions are averaged.
- `mlp-over`: the same, where an underestimate weighs more: the paper's preference for overestimates.
- `boosting`: gradient boosting of the median, the modern rival.
- `paper`: the paper's analytical model, refit by `rtvirtio_model::paper`, as the baseline.

A row is one task at one percentile that has ten samples beyond it. The target is the decimal
logarithm of the tail in seconds, so that errors are relative. Rows of one condition belong together: all
are for training (80 %), for conformal scores (10 %) or for the test (10 %), by the condition's id; folds
are cut between conditions too. Errors are of the test's rows at the judged percentile.

Conditions that were measured for real (`rows_of_cells`) judge the models as well: in each of five folds
they are trained on simulated rows and, with as much weight, on the other four fifths of the real conditions,
so that each real condition is judged once.

The bound is one for all models. A second regressor, gradient boosting of the 95 % quantile (`High`), says how
high a tail may come; how far measurements lie above that are the scores of MAPIE's split conformal bound
(conformalised quantile regression; of its interval of 90 % the upper end is used, which 5 % exceed). So
the bound is wide where two runs of one condition differ a hundredfold, and near where they agree. That
regressor has seen simulated rows alone, and the point predictions are no part of the scores: all
real conditions but the judged ones give some. They are kept apart by regime where there are enough
(`groups`). Task-rows of one condition are not independent, so coverage is measured on conditions that
gave no scores rather than taken on trust.
"""

import json
import os
import tomllib
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from mapie.conformity_scores import AbsoluteConformityScore
from mapie.regression import SplitConformalRegressor
from onnx import TensorProto, compose, helper, numpy_helper
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

from rtvirtio import _core, grid
from rtvirtio.types import Condition, Length, Outcome, PaperFit, Profile

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

#: The paper's network.
NEURONS, LAYERS, FOLDS = 15, 3, 5
#: Rows that a network sees in training, all passes together; and the fewest and most passes.
VISITS, PASSES = 2_000_000, (60, 400)
#: How many times an underestimate weighs in `mlp-over`, and how often the weights are set anew.
OVER, ROUNDS = 4.0, 3
CONFIDENCE = 0.95
#: Scores that a regime needs for a bound on three tasks together at that confidence which nine of ten
#: calibrations keep (docs/learned-models.md).
ENOUGH = 137
#: Samples beyond a percentile that make it one to learn from.
BEYOND = 10
#: How often the simulator is asked about a condition (`asked`).
RUNS = 24
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
        tenth = np.array([int(grid.condition_id(c)[:8], 16) % 10 for c in self.conditions])
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
    """Cells of `rtvirtio-lab bench` that count: each task with a rate, at its judged percentile."""

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


class Fitted(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A regressor of fitted ones. MAPIE asks that ``fit`` be there."""

    #: Where MAPIE looks whether it is.
    is_fitted = True

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def fit(self, x: Floats, y: Floats) -> Self:
        """Nothing is left to do."""
        return self


class Ensemble(Fitted):
    """Networks on the same scaled features, averaged."""

    def __init__(self, scaler: StandardScaler, members: list[MLPRegressor]) -> None:
        self.scaler = scaler
        self.members = members

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
    # By the pinball loss on simulated conditions that it had not seen: 127 leaves do better than 63 and 31.
    model = HistGradientBoostingRegressor(
        loss="quantile", quantile=quantile, max_iter=300, learning_rate=0.1, max_leaf_nodes=127,
        min_samples_leaf=40 if len(data) > 10_000 else 20, random_state=seed, early_stopping=False,
    )  # fmt: skip
    return model.fit(data.features, data.tail)


class High(Fitted):
    """How high a tail may come: a quantile of simulated ones, and beside it what the machine itself is late,
    which the simulator is never.
    """

    def __init__(self, quantile: HistGradientBoostingRegressor, late: float = 0.0) -> None:
        self.quantile = quantile
        #: s.
        self.late = late

    def predict(self, x: Floats) -> Floats:
        """log10 s."""
        return np.asarray(np.log10(10 ** self.quantile.predict(x) + self.late))


def lateness(profile: Profile) -> float:
    """What the profile's machine adds to the p99.9 of a VM alone on the idle device, s: its first probe
    beside the simulator.
    """
    fit: Any = profile["structural"]
    alone = _core.simulate(grid.one(scheduler={"name": "none"}))
    *_, heavy = alone["vms"][0]
    judged = heavy["judged"]
    assert judged is not None
    assert judged["percentile"] == 99.9
    return max(0.0, float(fit["base"][0]["p999"] - judged["value"]) / 1e9)


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


def groups(of: Rows, rows: Rows) -> npt.NDArray[np.str_]:
    """What keeps the scores ``of`` those rows apart, for each of ``rows``: its regime, or whether bfq idles
    if there are too few scores of one of the regimes in which it does or does not.
    """
    names, counts = np.unique(of.regime, return_counts=True)
    enough = dict(zip(names.tolist(), (counts >= ENOUGH).tolist(), strict=True))
    kinds = {idles: [n for n in names.tolist() if n.startswith("idling") == idles] for idles in (True, False)}
    pooled = {idles for idles, found in kinds.items() if not all(enough[n] for n in found)}

    def group(regime: str) -> str:
        idles = regime.startswith("idling")
        return ("idles" if idles else "does not") if idles in pooled or regime not in enough else regime

    return np.array([group(regime) for regime in rows.regime.tolist()], dtype=np.str_)


def bounds(high: Regressor, calibration: Rows, test: Rows) -> Floats:
    """MAPIE's one-sided bound for each row of ``test``, log10 s; NaN with too few scores."""
    found = np.full(len(test), np.nan)
    of_calibration, of_test = groups(calibration, calibration), groups(calibration, test)
    for group in np.unique(of_test):
        scored, judged = calibration.take(of_calibration == group), of_test == group
        if len(scored) < 1 / (1 - CONFIDENCE) + 1:
            continue
        mapie = SplitConformalRegressor(
            high,
            # Of a two-sided interval with signed scores each end is missed by half.
            confidence_level=2 * CONFIDENCE - 1,
            conformity_score=AbsoluteConformityScore(sym=False),
            prefit=True,
        )
        mapie.conformalize(scored.features, scored.tail)
        _, interval = mapie.predict_interval(test.features[judged])
        found[judged] = interval[:, 1, 0]
    return found


def planned(high: Regressor, calibration: Rows, test: Rows) -> Floats:
    """The bound that a plan has for one task (`rtvirtio_model::conformal`): nine of ten calibrations are to
    keep the confidence, so it is somewhat wider.
    """
    found = np.full(len(test), np.nan)
    of_calibration, of_test = groups(calibration, calibration), groups(calibration, test)
    scores, highs = calibration.tail - high.predict(calibration.features), high.predict(test.features)
    for group in np.unique(of_test):
        score = _core.conformal(scores[of_calibration == group].tolist(), CONFIDENCE)
        if score is not None:
            found[of_test == group] = highs[of_test == group] + score
    return found


def covered(bound: Floats, test: Rows) -> dict[str, Any]:
    """How bounds held, and how far they are above what was measured. The interval (95 %) is of conditions
    drawn anew, whose tasks stay together.
    """
    held = test.tail <= bound
    _, place = np.unique(test.condition, return_inverse=True)
    tasks, kept = np.bincount(place), np.bincount(place, held)
    drawn = np.random.default_rng(1).integers(0, len(tasks), (2000, len(tasks)))
    of_drawn = kept[drawn].sum(axis=1) / tasks[drawn].sum(axis=1)
    return {
        "confidence": CONFIDENCE,
        "rows": len(test),
        "held": float(np.mean(held)),
        "held_interval": np.quantile(of_drawn, [0.025, 0.975]).tolist(),
        "conditions_held": float(np.mean(kept == tasks)),
        "median_bound_over_measured": float(np.nanmedian(10 ** (bound - test.tail))),
    }


def repeated(real: Rows) -> dict[str, Any]:
    """How far two real runs of one condition differ: what a bound could be at best that knows no more of a
    condition than another run of it. `factor` is the one by which one of the two is exceeded by the other in
    5 % of tasks; `bound` is such a factor on another run, each time of the pairs of other conditions.
    """
    names = _names(real.conditions)
    pairs: dict[tuple[str, int, int, float], list[int]] = {}
    for row, place in enumerate(real.condition.tolist()):
        key = (names[place], int(real.vm[row]), int(real.task[row]), float(real.percentile[row]))
        pairs.setdefault(key, []).append(row)
    both = np.array([found for found in pairs.values() if len(found) == 2], dtype=np.intp).reshape(-1, 2)
    one, other = np.concatenate([both, both[:, ::-1]]).T
    if not len(one):
        return {"pairs": 0}
    differ = real.tail[other] - real.tail[one]
    condition = np.array([names[place] for place in real.condition[one]])
    bound = np.full(len(one), np.nan)
    for name in np.unique(condition):
        bound[condition == name] = np.quantile(differ[condition != name], CONFIDENCE, method="higher")
    return {
        "pairs": len(both),
        "conditions": len(np.unique(condition)),
        "median_factor": float(10 ** np.median(np.abs(differ))),
        "factor": float(10 ** np.quantile(differ, CONFIDENCE)),
        "bound": covered(real.tail[one] + bound, real.take(other)),
    }


def asked(real: Rows, fold: Indices, late: float) -> dict[str, Any]:
    """What a bound could be that is not learned: the 95 % quantile of ``RUNS`` simulations of the very
    condition, ``late`` s, and a factor by which what was measured in the other folds lies above that.
    """
    names = _names(real.conditions)
    distinct = dict(zip(names, real.conditions, strict=True))

    def runs(condition: Condition) -> list[Outcome]:
        return [_core.simulate({**condition, "seed": seed}) for seed in range(1, RUNS + 1)]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        outcomes = dict(zip(distinct, pool.map(runs, distinct.values()), strict=True))
    high = np.full(len(real), np.nan)
    for row, place in enumerate(real.condition.tolist()):
        of_task = [o["vms"][real.vm[row]][real.task[row]] for o in outcomes[names[place]]]
        quantiles = [q for task in of_task for q in task["quantiles"]]
        if found := [q["value"] / 1e9 for q in quantiles if q["percentile"] == real.percentile[row]]:
            high[row] = np.log10(np.quantile(found, CONFIDENCE) + late)
    bound = high.copy()
    for number in np.unique(fold):
        scores = (real.tail - high)[fold != number]
        bound[fold == number] += np.nanquantile(scores, CONFIDENCE, method="higher")
    return covered(bound, real)


def conformal(model: Regressor, high: Regressor, calibration: Rows, test: Rows) -> dict[str, Any]:
    """How bounds hold on rows at the judged percentile; none is below what ``model`` predicts."""
    calibration, test = calibration.take(calibration.judged), test.take(test.judged)
    return covered(np.maximum(bounds(high, calibration, test), model.predict(test.features)), test)


def _names(conditions: list[Condition]) -> list[str]:
    """A name for each condition, the same for its repetitions."""
    return [json.dumps({**condition, "seed": 0}, sort_keys=True) for condition in conditions]


def on_real(
    real: Rows,
    simulated: Rows,
    high: High,
    throughput: int,
    seed: int,
    say: Callable[[str], object],
    models: Sequence[str] = ("mlp", "mlp-over", "boosting"),
) -> tuple[dict[str, Any], pa.Table]:
    """Those models on real conditions that they have not seen: errors, bounds, predictions."""
    rng = np.random.default_rng(seed)
    kept = rng.permutation(len(simulated))[:STUDY_ROWS]
    simulated = simulated.take(np.sort(kept))
    # Repetitions of one condition have one fold.
    names = _names(real.conditions)
    distinct = {name: place for place, name in enumerate(dict.fromkeys(names))}
    order = rng.permutation(len(distinct))
    fold = np.array([order[distinct[name]] % FOLDS for name in names])[real.condition]
    makers: dict[str, Callable[[Rows], Regressor]] = {
        "mlp": lambda data: ensemble(data, seed=seed)[0],
        "mlp-over": lambda data: ensemble(data, OVER, seed)[0],
        "boosting": lambda data: boosting(data, 0.5, seed),
    }
    predicted = {name: np.full(len(real), np.nan) for name in ("paper", *models)}
    bound = {"split": np.full(len(real), np.nan), "planned": np.full(len(real), np.nan)}
    for number in range(FOLDS):
        test = fold == number
        training = real.take(~test)
        paper = Paper(training, throughput)
        predicted["paper"][test] = paper.predict(real.take(test))
        times = max(1, round(len(simulated) / len(training)))
        both = simulated.joined(training.take(np.tile(np.arange(len(training)), times)))
        for name in models:
            predicted[name][test] = makers[name](both).predict(real.features[test])
        bound["split"][test] = bounds(high, training, real.take(test))
        bound["planned"][test] = planned(high, training, real.take(test))
        say(f"real conditions: fold {number + 1} of {FOLDS} done")
    spoken = np.isfinite(predicted["paper"])
    idles = np.char.startswith(real.regime, "idling")

    def held(which: str, rows: npt.NDArray[np.bool_]) -> dict[str, Any]:
        of = real.take(rows)
        return {name: covered(np.maximum(bound[which], predicted[name])[rows], of) for name in models}

    result = {
        "conditions": len(distinct),
        "errors": {name: errors(real.tail, values) for name, values in predicted.items()},
        # Where the paper's model speaks.
        "errors_idling": {name: errors(real.tail[spoken], v[spoken]) for name, v in predicted.items()},
        "bounds": held("split", np.full(len(real), True)),
        "bounds_idling": held("split", idles),
        "bounds_not_idling": held("split", ~idles),
        "bounds_planned": held("planned", np.full(len(real), True)),
        "repeated": repeated(real),
        "asked": asked(real, fold, high.late),
    }
    say(f"real conditions: simulated {RUNS} times each")
    return result, _predictions(real, predicted)


@threadpool_limits.wrap(limits=1)  # type: ignore[untyped-decorator]
def judge(
    table: pa.Table,
    cells: list[dict[str, Any]],
    out: Path,
    *,
    profile: Profile,
    seed: int = 1,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Of `train` only how the network and boosting do on real conditions: writes `real.json` and
    `real.parquet` to ``out``; gives back the JSON.
    """
    out.mkdir(parents=True, exist_ok=True)
    training = rows(table).part(*TRAINING)
    high = High(boosting(training, CONFIDENCE, seed), lateness(profile))
    say(
        f"{len(training):,} simulated rows; beside the simulator the machine is {high.late * 1e3:.2f} ms late"
    )
    throughput = int(profile["capacity"]["write_throughput"])  # type: ignore[index]
    names = ("mlp", "boosting")
    real, found = on_real(rows_of_cells(cells), training, high, throughput, seed, say, names)
    result = {"version": _core.__version__, "seed": seed, "late_ms": 1000 * high.late, "real": real}
    pq.write_table(found, out / "real.parquet")
    (out / "real.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def describe(high: Regressor, training: Rows, scored: Rows, profile: Profile) -> str:
    """The description in an ONNX file (docs/learned-models.md): JSON."""
    judged = scored.take(scored.judged)
    score = np.log(10) * (judged.tail - high.predict(judged.features))
    group = groups(judged, judged)
    scores = {
        str(regime): sorted(score[group == group[judged.regime == regime][0]].tolist())
        for regime in np.unique(judged.regime)
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


def export(model: Ensemble | HistGradientBoostingRegressor, high: High, description: str) -> bytes:
    """An ONNX file of `rtvirtio plan --model`: what ``model`` predicts, and beside it what ``high`` does."""

    def converted(model: HistGradientBoostingRegressor) -> onnx.ModelProto:
        inputs = [("features", FloatTensorType([None, len(_core.FEATURES)]))]
        made: onnx.ModelProto = convert_sklearn(model, initial_types=inputs, target_opset=13)
        return made

    made = model.onnx() if isinstance(model, Ensemble) else converted(model)
    beside = compose.add_prefix(converted(high.quantile), "high_", rename_inputs=False)
    graph = made.graph
    [tail], [quantile] = graph.output, beside.graph.output
    graph.node.extend(beside.graph.node)
    graph.initializer.extend(beside.graph.initializer)
    constants = {"ln_10": np.log(10), "late": high.late, "lg_e": 1 / np.log(10)}
    graph.initializer.extend(
        numpy_helper.from_array(np.array(value, dtype=np.float32), name) for name, value in constants.items()
    )
    # log10(10^quantile + late)
    steps = (
        ("Mul", quantile.name, "ln_10", "ln_quantile"),
        ("Exp", "ln_quantile", None, "quantile_s"),
        ("Add", "quantile_s", "late", "high_s"),
        ("Log", "high_s", None, "ln_high"),
        ("Mul", "ln_high", "lg_e", "high"),
    )
    for operator, one, other, given in steps:
        graph.node.append(helper.make_node(operator, [one] if other is None else [one, other], [given]))
    graph.node.append(helper.make_node("Concat", [tail.name, "high"], ["tail_and_high"], axis=1))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("tail_and_high", TensorProto.FLOAT, [None, 2]))
    used = {opset.domain for opset in made.opset_import}
    made.opset_import.extend(opset for opset in beside.opset_import if opset.domain not in used)
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
    ids = [grid.condition_id(condition) for condition in data.conditions]
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
    models do on real conditions, whose scores then are the files'. Gives back the JSON.
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
    }
    late = 0.0 if profile is None else lateness(profile)
    high = High(boosting(training, CONFIDENCE, seed), late)
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
        "late_ms": 1000 * late,
        "bounds": {name: conformal(model, high, calibration, test) for name, model in models.items()},
        "sizes": study(training, say) if sizes else None,
        "real": None,
    }
    # What is measured decides how far a bound must be above; of it `high` has seen nothing.
    scored = calibration
    if cells is not None:
        scored = rows_of_cells(cells)
        result["real"], found = on_real(scored, training, high, throughput, seed, say)
        pq.write_table(found, out / "real.parquet")
    if profile is None:
        say("no profile of the device: no ONNX file is written (--profile)")
    else:
        for name, model in models.items():
            description = describe(high, training, scored, profile)
            (out / f"{name}.onnx").write_bytes(export(model, high, description))
    (out / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    return result
