"""Models learned from a campaign, and how wrong they are on conditions that they have not seen.

`dataset` makes rows of a campaign, `models` learns from them, `conformal_bound` bounds what they say,
`evaluate` judges them, and `onnx_export` writes them down. This module does one after the other.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from threadpoolctl import threadpool_limits

from rtvirtio import _core
from rtvirtio.conformal_bound import CONFIDENCE, conformal
from rtvirtio.dataset import CALIBRATION, TEST, TRAINING, Floats, Rows, rows, rows_of_cells
from rtvirtio.evaluate import errors, on_real, predictions_table, study
from rtvirtio.models import OVER, High, Paper, boosting, ensemble, lateness
from rtvirtio.onnx_export import describe, export
from rtvirtio.types import Profile


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
    pq.write_table(predictions_table(judged, predicted), out / "predictions.parquet")
    if shown is not None:
        of_shown = rows(shown)
        of_shown = of_shown.take(of_shown.judged)
        pq.write_table(predictions_table(of_shown, predict(of_shown)), out / "shown.parquet")
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
