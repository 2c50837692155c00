"""Rows to learn from: one task at one percentile that has ten samples beyond it.

The target is the decimal logarithm of the tail in seconds, so that errors are relative. Rows of one
condition belong together: all are for training (80 %), for conformal scores (10 %) or for the test
(10 %), by the condition's id.
"""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rtvirtio import _core, grid
from rtvirtio.types import Condition, Length, Priority

Floats = npt.NDArray[np.float64]


Indices = npt.NDArray[np.intp]
#: Samples beyond a percentile that make it one to learn from.
BEYOND = 10
_COLUMNS = ((99.0, "p99_ns"), (99.9, "p999_ns"), (99.99, "p9999_ns"))


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
            schedulers = [settings["scheduler"]["name"] for settings in cell["settings"].values()]
            # iocost is not simulated.
            if cell["discarded"] is not None or "io-cost" in schedulers:
                continue
            key = cell["key"]
            window = round(cell["window_s"] * 1e9)
            specification = _core.case(key["case"], key["tier"], key["neighbour"], window)
            [(name, settings)] = cell["settings"].items()
            length: Length = {"at_least": window, "at_most": window}
            path = grid.Settings("host")
            condition = _core.condition(
                specification,
                settings,
                name,
                _core.device(cell["device"]),
                length,
                key["repetition"],
                nesting=path.nesting,
                transport_ns=round(path.transport * 1000),
                software_ns=round(path.software * 1000),
                priorities={vm: _priority(text) for vm, text in cell.get("ioprio", {}).items()},
            )
            # Its campaign has bfq alone: one that goes on from cell to cell.
            condition["seasoned"] = key["scheme"].startswith("condition")
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


def _priority(text: str) -> Priority:
    """What a cell says of a VM's I/O class, ``rt/0``, as a condition has it."""
    kind, level = text.split("/")
    return {{"rt": "real-time", "be": "best-effort"}[kind]: int(level)}


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


def condition_ids(conditions: list[Condition]) -> list[str]:
    """A name for each condition, the same for its repetitions."""
    return [json.dumps({**condition, "seed": 0}, sort_keys=True) for condition in conditions]
