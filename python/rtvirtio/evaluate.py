"""How wrong models are on conditions that they have not seen.

Errors are of the test's rows at the judged percentile. Conditions that were measured for real
(`rows_of_cells`) judge the models as well: in each of five folds they are trained on simulated rows and, with
as much weight, on the other four fifths of the real conditions, so that each real condition is judged once.
"""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.model_selection import GroupKFold
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from rtvirtio import _core, grid
from rtvirtio.conformal_bound import CONFIDENCE, bounds, covered, planned
from rtvirtio.dataset import TRAINING, Floats, Indices, Rows, condition_ids, rows, rows_of_cells
from rtvirtio.models import (
    FOLDS,
    OVER,
    High,
    Paper,
    Regressor,
    boosting,
    ensemble,
    fit_network,
    lateness,
    network,
)
from rtvirtio.types import Condition, Outcome, Profile

#: How often the simulator is asked about a condition (`asked`).
RUNS = 24
#: Of the size study: rows, and what is tried.
STUDY_ROWS, STUDY_NEURONS, STUDY_LAYERS = 20_000, range(1, 21), (1, 2, 3, 4)


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


def repeated(real: Rows) -> dict[str, Any]:
    """How far two real runs of one condition differ: what a bound could be at best that knows no more of a
    condition than another run of it. `factor` is the one by which one of the two is exceeded by the other in
    5 % of tasks; `bound` is such a factor on another run, each time of the pairs of other conditions.
    """
    names = condition_ids(real.conditions)
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
    names = condition_ids(real.conditions)
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
    names = condition_ids(real.conditions)
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
    return result, predictions_table(real, predicted)


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
            fit_network(model, x[train], y[train])
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


def predictions_table(data: Rows, predicted: dict[str, Floats]) -> pa.Table:
    """What each model predicts for each row, ms, beside what was measured."""
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
