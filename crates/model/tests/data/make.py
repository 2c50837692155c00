"""Makes the models of `src/learned/tests.rs`, and what onnxruntime answers to them.

    pip install scikit-learn skl2onnx onnx onnxruntime 'protobuf<7'
    python crates/model/tests/data/make.py

Each MODEL.onnx is a regressor of the features of `src/features.rs`. `expected.json` has, for each,
rows and the outputs of onnxruntime for them. The rows are random within plausible ranges and the
target is a made-up law of them: what is tested is that both runtimes compute the same.
(skl2onnx 1.20 gives integers as booleans for histogram gradient boosting, which protobuf 7 refuses.)
"""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from skl2onnx import to_onnx
from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType
from sklearn.ensemble import (
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    RandomForestRegressor,
    VotingRegressor,
)
from sklearn.linear_model import LinearRegression
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

HERE = Path(__file__).parent
FEATURES = re.findall(
    r'^    "(\w+)",$',
    re.search(
        r"pub const FEATURES.*?\];", (HERE / "../../src/features.rs").read_text(), re.S
    ).group(),
    re.M,
)
DEVICE = {
    "kind": "loop",
    "model": "ref-4x250",
    "serial": None,
    "size": 1 << 30,
    "rotational": False,
}
RANDOM = np.random.default_rng(1)


def training_rows(count: int) -> np.ndarray:
    """Loads such as `features` makes, as columns by name."""
    pick = lambda *values: RANDOM.choice(values, count)
    scheduler = RANDOM.integers(0, 4, count)
    bfq = scheduler == 3
    capped = pick(0, 1)
    columns = dict.fromkeys(FEATURES, np.zeros(count)) | {
        "vms": pick(1, 2, 3, 4, 5),
        "vm_tasks": pick(1, 2, 3),
        "task_iops": pick(100, 500, 1500),
        "task_block_kib": np.full(count, 4.0),
        "task_read_fraction": np.full(count, 0.7),
        "task_depth": np.full(count, 1.0),
        "percentile_nines": pick(2, 3, 4),
        "vm_kib_per_s": RANDOM.uniform(400, 8400, count),
        "host_kib_per_s": RANDOM.uniform(400, 34000, count),
        "vm_weight": RANDOM.uniform(0.01, 1, count),
        "host_none": scheduler == 0,
        "host_mq_deadline": scheduler == 1,
        "host_kyber": scheduler == 2,
        "host_bfq": bfq,
        "host_slice_idle_ms": bfq * pick(0, 1, 2, 4, 8),
        "host_timeout_sync_ms": bfq * pick(32, 64, 124),
        "host_low_latency": bfq * pick(0, 1),
        "host_max_budget_kib": bfq * pick(32, 256, 2048, 8192),
        "others_capped": capped,
        "others_cap_kib_per_s": capped * RANDOM.uniform(977, 360000, count),
        "background_kib": pick(0, 16384),
    }
    return np.column_stack([columns[name] for name in FEATURES]).astype(float)


def tails(rows: np.ndarray) -> np.ndarray:
    """log10 of seconds, by a law that has no other purpose."""
    of = {name: rows[:, i] for i, name in enumerate(FEATURES)}
    idling = (of["host_slice_idle_ms"] > 0) * of["vms"] * of["host_timeout_sync_ms"] / 1e3
    burst = of["others_cap_kib_per_s"] / 4e6
    flood = (of["background_kib"] > 0) * (of["others_capped"] == 0) * 0.02
    base = 0.0005 * of["percentile_nines"] + of["host_kib_per_s"] / 1e8
    return np.log10(base + burst + idling + flood) + RANDOM.normal(0, 0.1, len(rows))


def description(rows: np.ndarray) -> dict:
    scores = sorted(round(float(s), 4) for s in RANDOM.normal(0, 0.1, 200))
    regimes = ["flowing", "bursting", "flooded", "idling", "idling-flooded"]
    return {
        "version": 1,
        "features": FEATURES,
        "minimum": rows.min(axis=0).tolist(),
        "maximum": rows.max(axis=0).tolist(),
        "output": "log10_s",
        "scores": dict.fromkeys(regimes, scores),
        "device": DEVICE,
        "write_throughput": 371_000_000,
    }


def many_operators() -> onnx.ModelProto:
    """As a framework other than scikit-learn might export it: PyTorch's Gemm, and shapes computed."""
    count = len(FEATURES)
    weight = RANDOM.normal(0, 0.3, (6, count)).astype(np.float32)
    constants = {
        "mean": RANDOM.uniform(0, 5, count).astype(np.float32),
        "scale": RANDOM.uniform(0.001, 0.01, count).astype(np.float32),
        "weight": weight,
        "bias": RANDOM.normal(0, 1, 6).astype(np.float32),
        "gamma": RANDOM.uniform(0.5, 1, 6).astype(np.float32),
        "beta": RANDOM.normal(0, 1, 6).astype(np.float32),
        "running_mean": RANDOM.normal(0, 1, 6).astype(np.float32),
        "running_var": RANDOM.uniform(0.5, 1, 6).astype(np.float32),
        "axis": np.array([1], dtype=np.int64),
        "first": np.array(0, dtype=np.int64),
        "pair": np.array([2, 4], dtype=np.int64),
        "least": np.array(-3, dtype=np.float32),
        "half": np.array(0.5, dtype=np.float32),
        "minus": np.array([-1], dtype=np.int64),
    }
    node = helper.make_node
    nodes = [
        node("Sub", ["x", "mean"], ["centred"]),
        node("Mul", ["centred", "scale"], ["scaled"]),
        node("Gemm", ["scaled", "weight", "bias"], ["hidden"], transB=1, alpha=0.5, beta=2.0),
        node(
            "BatchNormalization",
            ["hidden", "gamma", "beta", "running_mean", "running_var"],
            ["normal"],
        ),
        node("LeakyRelu", ["normal"], ["leaky"], alpha=0.2),
        node("Elu", ["normal"], ["elu"], alpha=0.7),
        node("Sigmoid", ["normal"], ["sigmoid"]),
        node("Softplus", ["normal"], ["softplus"]),
        node("Tanh", ["normal"], ["tanh"]),
        node("Max", ["leaky", "elu", "sigmoid"], ["max"]),
        node("Min", ["tanh", "softplus"], ["min"]),
        node("Mean", ["max", "min"], ["average"]),
        node("Concat", ["average", "sigmoid"], ["wide"], axis=-1),
        node("Shape", ["wide"], ["shape"]),
        node("Gather", ["shape", "first"], ["rows"], axis=0),
        node("Unsqueeze", ["rows", "rows_axis"], ["rows_1d"]),
        node("Concat", ["rows_1d", "minus"], ["target"], axis=0),
        node("Reshape", ["wide", "target"], ["again"]),
        node("Gather", ["again", "pair"], ["chosen"], axis=1),
        node("ReduceSum", ["chosen", "axis"], ["two"], keepdims=1),
        node("ReduceMean", ["again"], ["mean_of_row"], axes=[1], keepdims=0),
        node("Unsqueeze", ["mean_of_row", "axis"], ["column"]),
        node("Clip", ["two", "least", ""], ["clipped"]),
        node("Abs", ["clipped"], ["size"]),
        node("Pow", ["size", "half"], ["root"]),
        node("Sum", ["root", "column", "column"], ["sum"]),
        node("Neg", ["sum"], ["output"]),
    ]
    constants["rows_axis"] = np.array([0], dtype=np.int64)
    graph = helper.make_graph(
        nodes,
        "many_operators",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", count])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["rows", 1])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def constant() -> onnx.ModelProto:
    """10 ms, whatever is asked."""
    node = helper.make_node(
        "LinearRegressor",
        ["x"],
        ["output"],
        domain="ai.onnx.ml",
        coefficients=[0.0] * len(FEATURES),
        intercepts=[-2.0],
    )
    graph = helper.make_graph(
        [node],
        "constant",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, len(FEATURES)])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [None, 1])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model)
    return model


def main() -> None:
    rows = training_rows(3000)
    y = tails(rows)
    described = description(rows)
    network = lambda seed: MLPRegressor(hidden_layer_sizes=(15, 15, 15), max_iter=300, random_state=seed)
    singles = {
        # The paper's: three layers of 15.
        "mlp": make_pipeline(StandardScaler(), network(0)),
        # Five of them, averaged, as the paper does.
        "ensemble": VotingRegressor(
            [(f"mlp{i}", make_pipeline(MinMaxScaler(), network(i))) for i in range(5)]
        ),
        "boosting": GradientBoostingRegressor(n_estimators=60, random_state=0),
        "histogram": HistGradientBoostingRegressor(max_iter=30, max_leaf_nodes=15, random_state=0),
        "forest": RandomForestRegressor(n_estimators=8, max_depth=6, random_state=0),
        "linear": LinearRegression(),
    }
    asked = np.vstack([rows[:20], training_rows(20)])
    expected = {}

    def save(name: str, model: onnx.ModelProto, rows: np.ndarray) -> None:
        (HERE / f"{name}.onnx").write_bytes(model.SerializeToString())
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        (source,) = session.get_inputs()
        of_type = rows.astype(np.float64 if "double" in source.type else np.float32)
        (output,) = session.run(None, {source.name: of_type})
        print(name, len(model.SerializeToString()), sorted({n.op_type for n in model.graph.node}))
        expected[name] = output.reshape(-1).astype(float).tolist()

    def describe(model: onnx.ModelProto, **changes: object) -> onnx.ModelProto:
        helper.set_model_props(model, {"rtvirtio": json.dumps(described | changes)})
        return model

    for name, regressor in singles.items():
        regressor.fit(rows, y)
        count = len(FEATURES)
        model = to_onnx(regressor, initial_types=[("x", FloatTensorType([None, count]))])
        save(name, describe(model), asked)
        if name == "mlp":
            double = to_onnx(regressor, initial_types=[("x", DoubleTensorType([None, count]))])
            save("double", describe(double), asked)
    # A file that says nothing of itself.
    save("many_operators", many_operators(), asked)
    # For the planner's tests: its bound is its prediction times e^0.1.
    scores = {regime: [0.1] * 100 for regime in described["scores"]}
    ranges = {
        "vms": (1, 8),
        "vm_tasks": (1, 4),
        "task_iops": (100, 1500),
        "task_block_kib": (4, 4),
        "task_read_fraction": (0.7, 0.7),
        "task_depth": (1, 1),
        "percentile_nines": (2, 4),
        "vm_kib_per_s": (400, 20_000),
        "host_kib_per_s": (400, 40_000),
        "vm_weight": (0, 1),
        "host_slice_idle_ms": (0, 8),
        "host_timeout_sync_ms": (0, 124),
        "host_max_budget_kib": (0, 8192),
        "guest_slice_idle_ms": (0, 0),
        "guest_timeout_sync_ms": (0, 0),
        "others_cap_kib_per_s": (0, 360_000),
        "background_kib": (0, 16_384),
    }
    ranges = [tuple(map(float, ranges.get(name, (0, 1)))) for name in FEATURES]
    minimum, maximum = map(list, zip(*ranges))
    save(
        "constant",
        describe(constant(), scores=scores, minimum=minimum, maximum=maximum),
        asked,
    )
    data = {"rows": asked.tolist(), "expected": expected}
    (HERE / "expected.json").write_text(json.dumps(data) + "\n")


main()
