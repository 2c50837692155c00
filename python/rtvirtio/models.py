"""Regressors: the paper's network and its variants, gradient boosting, and the paper's own model.

- `mlp`: the paper's network, 3 hidden layers of 15 ReLU neurons, squared error; 5-fold cross-validation,
  whose five networks' predictions are averaged.
- `mlp-over`: the same, where an underestimate weighs more: the paper's preference for overestimates.
- `boosting`: gradient boosting of the median, the modern rival.
- `paper`: the paper's analytical model, refit by `rtvirtio_model::paper`, as the baseline.
"""

import warnings
from typing import Any, Protocol, Self

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from scipy.linalg import block_diag
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GroupKFold
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import StandardScaler

from rtvirtio import _core, grid
from rtvirtio.dataset import Floats, Rows
from rtvirtio.types import PaperFit, Profile

#: The paper's network.
NEURONS, LAYERS, FOLDS = 15, 3, 5
#: Rows that a network sees in training, all passes together; and the fewest and most passes.
VISITS, PASSES = 2_000_000, (60, 400)
#: How many times an underestimate weighs in `mlp-over`, and how often the weights are set anew.
OVER, ROUNDS = 4.0, 3


class Regressor(Protocol):
    """What scikit-learn calls a fitted regressor."""

    def predict(self, x: Floats) -> Floats:
        """The output for each row."""


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


def fit_network(model: MLPRegressor, x: Floats, y: Floats, weight: Floats | None = None) -> None:
    """Trains a network for its number of passes; rows weigh as `weight` says."""
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
        fit_network(member, x[train], y[train])
        if over > 1.0:
            member.set_params(warm_start=True, max_iter=20)
            for _ in range(ROUNDS):
                weight = np.where(y[train] > member.predict(x[train]), over, 1.0)
                fit_network(member, x[train], y[train], weight / weight.mean())
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
    beside the simulator, which has the device of the profile's label.

    Raises ``ValueError`` if that is no reference device.
    """
    fit: Any = profile["structural"]
    device: Any = profile["device"]
    condition = grid.one(scheduler={"name": "none"})
    condition["device"] = _core.device(device["model"])
    alone = _core.simulate(condition)
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
