"""A campaign's results on disk: Parquet files that are whole or not there.

A part holds all rows of some conditions. It is staged, synced and renamed to the SHA-256 of its own
bytes, so a name that does not fit tells of any damage, to the footer too, before anything is parsed. How
many rows and conditions it must have is in its metadata.

Properties (tests of the same names in test_parts.py): a part that was cut short, changed by one bit
or replaced is named and set aside; what is staged and not renamed is nothing.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rtvirtio import _core
from rtvirtio.types import Condition, Outcome

_I64, _F64, _TEXT = pa.int64(), pa.float64(), pa.string()

#: One row is one task of one condition. Times in ns.
SCHEMA = pa.schema(
    [
        pa.field("id", _TEXT, nullable=False),
        pa.field("vm", _I64, nullable=False),
        pa.field("task", _I64, nullable=False),
        # The condition as JSON, in each of its rows: whatever else is asked of it later.
        pa.field("condition", _TEXT, nullable=False),
        pa.field("seed", _I64, nullable=False),
        pa.field("version", _TEXT, nullable=False),
        pa.field("regime", _TEXT, nullable=False),
        pa.field("window_ns", _I64, nullable=False),
        pa.field("requested_iops", _F64),
        pa.field("delivered_iops", _F64, nullable=False),
        pa.field("mean_ns", _I64, nullable=False),
        pa.field("max_ns", _I64, nullable=False),
        pa.field("n", _I64, nullable=False),
        # The judged percentile: the highest with ten samples beyond it. None without one.
        pa.field("percentile", _F64),
        pa.field("value_ns", _I64),
        pa.field("low_ns", _I64),
        pa.field("high_ns", _I64),
        pa.field("p50_ns", _I64),
        pa.field("p99_ns", _I64),
        pa.field("p999_ns", _I64),
        pa.field("p9999_ns", _I64),
        # As `rtvirtio_model::features` has them, at the judged percentile (p99 without one).
        *(pa.field(f"feature_{name}", _F64, nullable=False) for name in _core.FEATURES),
    ]
)

_QUANTILES = {50.0: "p50_ns", 99.0: "p99_ns", 99.9: "p999_ns", 99.99: "p9999_ns"}
_ROWS, _CONDITIONS = b"rtvirtio.rows", b"rtvirtio.conditions"


def rows(id: str, condition: Condition, outcome: Outcome) -> list[dict[str, object]]:
    """The rows of one condition."""
    text = json.dumps(condition, sort_keys=True, separators=(",", ":"))
    places = [(vm, task) for vm, tasks in enumerate(outcome["vms"]) for task in range(len(tasks))]
    results = [outcome["vms"][vm][task] for vm, task in places]
    judged = [result["judged"] for result in results]
    asked = [
        (vm, task, 99.0 if j is None else j["percentile"])
        for (vm, task), j in zip(places, judged, strict=True)
    ]
    made: list[dict[str, object]] = []
    for (vm, task, _), features, result in zip(asked, _core.features(condition, asked), results, strict=True):
        j = result["judged"]
        quantiles = {_QUANTILES[q["percentile"]]: q["value"] for q in result["quantiles"]}
        made.append(
            {
                "id": id,
                "vm": vm,
                "task": task,
                "condition": text,
                "seed": condition["seed"],
                "version": _core.__version__,
                "regime": _core.regime(features),
                "window_ns": outcome["window"],
                "requested_iops": condition["vms"][vm]["tasks"][task]["iops"],
                "delivered_iops": result["delivered_iops"],
                "mean_ns": result["mean"],
                "max_ns": result["max"],
                "n": max((q["n"] for q in result["quantiles"]), default=0),
                "percentile": j and j["percentile"],
                "value_ns": j and j["value"],
                "low_ns": j and j["low"],
                "high_ns": j and j["high"],
                **quantiles,
                **{f"feature_{name}": value for name, value in zip(_core.FEATURES, features, strict=True)},
            }
        )
    return made


def table(made: list[dict[str, object]]) -> pa.Table:
    """Rows as a table."""
    return pa.Table.from_pylist(made, schema=SCHEMA)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(directory: Path, part: pa.Table) -> Path:
    """Writes a part: after this it is there, whatever happens; before, nothing is."""
    conditions = len(part["id"].unique())
    metadata = {_ROWS: str(part.num_rows), _CONDITIONS: str(conditions)}
    buffer = io.BytesIO()
    pq.write_table(part.replace_schema_metadata(metadata), buffer, compression="zstd")
    bytes_ = buffer.getbuffer()
    path = directory / f"part-{hashlib.sha256(bytes_).hexdigest()}.parquet"
    staged = directory / f".staged-{os.getpid()}"
    with staged.open("wb") as file:
        file.write(bytes_)
        file.flush()
        os.fsync(file.fileno())
    staged.rename(path)
    _sync(directory)
    return path


def read(path: Path) -> pa.Table:
    """A part; ValueError says how it is damaged."""
    content = path.read_bytes()
    if path.name != f"part-{hashlib.sha256(content).hexdigest()}.parquet":
        raise ValueError("its bytes are not those that its name is the SHA-256 of")
    try:
        # On this thread: Arrow's own, still at their start when a short command ends, abort it.
        part = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"not Parquet: {error}") from error
    metadata = part.schema.metadata or {}
    if not part.schema.equals(SCHEMA):
        raise ValueError("its columns are not those of this version")
    has = (str(part.num_rows), str(len(part["id"].unique())))
    says = tuple(metadata.get(key, b"?").decode() for key in (_ROWS, _CONDITIONS))
    if has != says:
        raise ValueError(f"rows and conditions are {has}, its metadata says {says}")
    return part


@dataclass(frozen=True)
class Damaged:
    """A part that was set aside."""

    name: str
    reason: str
    aside: Path

    def __str__(self) -> str:
        return f"{self.name}: damaged ({self.reason}); set aside as {self.aside}"


def each(directory: Path, damaged: list[Damaged]) -> Iterator[pa.Table]:
    """Every whole part. A damaged one is set aside and added to ``damaged``."""
    for path in sorted(directory.glob("part-*.parquet")):
        try:
            yield read(path)
        except ValueError as error:
            aside = directory / "damaged" / path.name
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
            damaged.append(Damaged(path.name, str(error), aside))


def clear_staged(directory: Path) -> None:
    """Takes away what a killed campaign staged."""
    for path in directory.glob(".staged-*"):
        path.unlink()


def load(directory: Path) -> pa.Table:
    """All rows of a campaign; ValueError if a part is damaged or there is none."""
    found = []
    for path in sorted(directory.glob("part-*.parquet")):
        try:
            found.append(read(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}\nhint: run the campaign again; it redoes this part") from error
    if not found:
        raise ValueError(f"{directory}: no part of a campaign is there")
    return pa.concat_tables(found)
