"""A model and the upper quantile as one ONNX graph, with what the planner has to know of them."""

import json

import numpy as np
import onnx
from onnx import TensorProto, compose, helper, numpy_helper
from skl2onnx import convert_sklearn
from skl2onnx.common.data_types import FloatTensorType
from sklearn.ensemble import HistGradientBoostingRegressor

from rtvirtio import _core
from rtvirtio.conformal_bound import groups
from rtvirtio.dataset import Rows
from rtvirtio.models import Ensemble, High, Regressor
from rtvirtio.types import Profile


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
