"""rtvirtio offline: the simulator, the models and the planner that ship, from Python.

>>> import rtvirtio
>>> condition = rtvirtio.grid.one(vms=4, rates=[100, 500, 1500])
>>> outcome = rtvirtio.simulate(condition)

Campaigns, training and figures are modules of their own, which need more than this one:
``rtvirtio.campaign``, ``rtvirtio.train``, ``rtvirtio.figures``, or ``python -m rtvirtio``.
"""

from rtvirtio import grid, types
from rtvirtio._core import (
    FEATURES,
    __version__,
    case,
    condition,
    conformal,
    device,
    expected_ns,
    features,
    learned_tails,
    paper_fit,
    paper_tails,
    plan,
    predict,
    regime,
    scheme,
    simulate,
    table_iii,
)

__all__ = [
    "FEATURES",
    "__version__",
    "case",
    "condition",
    "conformal",
    "device",
    "expected_ns",
    "features",
    "grid",
    "learned_tails",
    "paper_fit",
    "paper_tails",
    "plan",
    "predict",
    "regime",
    "scheme",
    "simulate",
    "table_iii",
    "types",
]
