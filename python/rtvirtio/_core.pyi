from collections.abc import Mapping, Sequence
from typing import Final

from rtvirtio.types import (
    Condition,
    Device,
    DeviceSettings,
    Length,
    Outcome,
    PaperFit,
    Plan,
    Prediction,
    Priority,
    Profile,
    Reading,
    Regime,
    SchemeSettings,
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
    "learned_tails",
    "paper_fit",
    "paper_tails",
    "plan",
    "predict",
    "regime",
    "scheme",
    "simulate",
    "table_iii",
]

__version__: Final[str]
FEATURES: Final[tuple[str, ...]]

def device(name: str) -> Device: ...
def expected_ns(condition: Condition) -> int: ...
def simulate(condition: Condition) -> Outcome: ...
def features(condition: Condition, asked: Sequence[tuple[int, int, float]]) -> list[list[float]]: ...
def regime(features: Sequence[float]) -> Regime: ...
def paper_fit(
    conditions: Sequence[Condition],
    tails: Sequence[Sequence[tuple[int, int]]],
    throughput: int,
    reading: Reading = "corrected",
) -> PaperFit: ...
def paper_tails(
    fit: PaperFit, conditions: Sequence[Condition], reading: Reading = "corrected"
) -> list[list[int]]: ...
def learned_tails(onnx: bytes, rows: Sequence[Sequence[float]]) -> list[tuple[int, int]]: ...
def conformal(scores: Sequence[float], confidence: float) -> float | None: ...
def table_iii() -> PaperFit: ...
def case(
    name: str, tier: str = "strict", neighbour: str = "none", window_ns: int = 30_000_000_000
) -> str: ...
def scheme(name: str, specification: str, iops_4k: float) -> SchemeSettings: ...
def plan(
    specification: str,
    profiles: Mapping[str, Profile],
    observed: Sequence[object] | None = None,
    onnx: bytes | None = None,
    model: str = "structural",
) -> Plan: ...
def predict(
    specification: str,
    profiles: Mapping[str, Profile],
    settings: Mapping[str, DeviceSettings],
    onnx: bytes | None = None,
) -> list[Prediction]: ...
def condition(
    specification: str,
    settings: DeviceSettings,
    name: str,
    device: Device,
    length: Length,
    seed: int = 1,
    warm_up_ns: int = 1_000_000_000,
    nesting: int = 1,
    transport_ns: int = 0,
    software_ns: int = 0,
    priorities: Mapping[str, Priority] | None = None,
    data_plane: bool = False,
) -> Condition: ...
