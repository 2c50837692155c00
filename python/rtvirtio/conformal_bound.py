"""The bound: conformalised quantile regression (Romano, Patterson and Candes 2019), by MAPIE.

The bound is one for all models. A second regressor, gradient boosting of the 95 % quantile (`High`), says how
high a tail may come; how far measurements lie above that are the scores of MAPIE's split conformal bound
(of its interval of 90 % the upper end is used, which 5 % exceed). So the bound is wide where two runs of one
condition differ a hundredfold, and near where they agree. That regressor has seen simulated rows alone, and
the point predictions are no part of the scores: all real conditions but the judged ones give some. They are
kept apart by regime where there are enough (`groups`). Task-rows of one condition are not independent, so
coverage is measured on conditions that gave no scores rather than taken on trust.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from mapie.conformity_scores import AbsoluteConformityScore
from mapie.regression import SplitConformalRegressor

from rtvirtio import _core
from rtvirtio.dataset import Floats, Rows
from rtvirtio.models import Regressor

CONFIDENCE = 0.95
#: Scores that a regime needs for a bound on three tasks together at that confidence which nine of ten
#: calibrations keep (docs/learned-models.md).
ENOUGH = 137


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


def conformal(model: Regressor, high: Regressor, calibration: Rows, test: Rows) -> dict[str, Any]:
    """How bounds hold on rows at the judged percentile; none is below what ``model`` predicts."""
    calibration, test = calibration.take(calibration.judged), test.take(test.judged)
    return covered(np.maximum(bounds(high, calibration, test), model.predict(test.features)), test)
