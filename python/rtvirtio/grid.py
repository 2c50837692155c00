"""Which conditions a campaign simulates, in an order that depends on nothing but its numbers.

Table II of the paper has too many combinations to run (7 x 10^13 for four VMs with three tasks each),
so a grid is cut into strata (number of VMs, number of tasks, ...) of equal share, and of each a sample
without repetition is drawn: the k-th draw of a stratum is decoded from SHA-256 of seed, stratum and k.
So a larger grid of the same seed holds all of a smaller one.

A condition's id is a hash of its content as JSON.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement, product
from math import prod
from typing import Any

from rtvirtio import _core
from rtvirtio.types import Bfq, Condition, Limits, Scheduler, Task, Vm

SECOND = 1_000_000_000
MEGABYTE = 1_000_000
#: Table II.
WEIGHTS = (50, 100, 150, 250, 300, 500, 700)
RATES = (100.0, 500.0, 1500.0)
SLICE_IDLE_MS = (1, 2, 4, 6, 8)
TIMEOUT_SYNC_MS = (32, 64, 124)
VMS = (1, 2, 3, 4)
TASKS = (1, 2, 3)
#: What the wider grid adds. max_budget in sectors; 0 tunes itself.
MAX_BUDGET = (0, 64, 512, 4096)
CAPS_MB = (10, 20, 40)
#: What the grid `host` adds to that.
HOST_CAPS_MB = (*CAPS_MB, 80)
#: Seeds of each condition that a figure shows: the paper has "30+ tests per condition".
REPETITIONS = 30


@dataclass(frozen=True)
class Settings:
    """What a grid is made from: kept in the campaign's directory, compared when it is resumed."""

    grid: str
    #: Conditions at least; strata get equal shares. 0: the grid's own number.
    size: int = 0
    device: str = "ref-4x250"
    #: What a request takes between scheduler and device and back, and beside that, µs: as ``rtvirtio-lab
    #: bench path`` has them, by which the median of what was measured on ref-4x250 is met.
    transport: float = 85.0
    software: float = 40.0
    #: Cgroups around the VMs', as the benchmark has them.
    nesting: int = 2
    #: Measured at least, s. 21 s judge p99.9 at 500 requests a second.
    window: float = 21.0
    #: Then on until ten samples of each task lie beyond this percentile.
    percentile: float = 99.0
    #: But no longer than so many windows.
    longest: float = 20.0
    #: I/O before the window, s.
    warm_up: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.grid not in SIZES:
            raise ValueError(f"grid: {self.grid!r} is none of {', '.join(SIZES)}")
        if self.size < 0 or self.seed < 0:
            raise ValueError("size and seed are not negative")

    def condition(self, seed: int, scheduler: Scheduler, vms: list[Vm]) -> Condition:
        """``vms`` on this grid's device behind ``scheduler``."""
        window = round(self.window * SECOND)
        return {
            "device": _core.device(self.device),
            "service": {"kind": "kernel", "scheduler": scheduler},
            "nesting": self.nesting,
            "transport": round(self.transport * 1000),
            "software": round(self.software * 1000),
            "vms": vms,
            "warm_up": round(self.warm_up * SECOND),
            "length": {
                "at_least": window,
                "until": {"percentile": self.percentile, "beyond": 10},
                "at_most": round(window * self.longest),
            },
            "seed": seed,
        }

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


#: The grids, with their own number of conditions. Those of `cases` are made by `rtvirtio.cases`.
SIZES = {"table2": 28_000, "wide": 18_000, "host": 24_000, "figures": 0, "cases": 0}


def bfq(
    slice_idle_ms: float = 8, timeout_sync_ms: int = 124, low_latency: bool = True, max_budget: int = 0
) -> Bfq:
    """bfq; the kernel's defaults."""
    return {
        "name": "bfq",
        "slice_idle_us": round(slice_idle_ms * 1000),
        "timeout_sync_ms": timeout_sync_ms,
        "low_latency": low_latency,
        "max_budget": max_budget,
    }


def task(iops: float | None, kib: int = 4, reads: float = 0.7, depth: int = 1) -> Task:
    """A task; by default the paper's: 4 KiB, 70 % reads, one at a time."""
    return {"iops": iops, "block_size": kib * 1024, "read_fraction": reads, "queue_depth": depth}


def limit(megabytes: int | None) -> Limits:
    """The same limit in MB/s on reads and on writes."""
    bps = None if megabytes is None else megabytes * MEGABYTE
    return {"read_bps": bps, "write_bps": bps, "read_iops": None, "write_iops": None}


def vm(
    tasks: Sequence[Task],
    weight: int = 100,
    guest: Scheduler | None = None,
    cap_mb: int | None = None,
) -> Vm:
    """A VM."""
    return {
        "weight": weight,
        "limits": limit(cap_mb),
        "priority": None,
        "guest": guest,
        "tasks": list(tasks),
    }


def one(
    vms: int = 1,
    rates: Sequence[float] = RATES,
    scheduler: Scheduler | None = None,
    neighbour: Vm | None = None,
    settings: Settings | None = None,
    seed: int = 1,
) -> Condition:
    """One condition: ``vms`` alike, each with a 4 KiB task of each rate, and perhaps a neighbour."""
    settings = settings or Settings("table2")
    alike = [vm([task(rate) for rate in rates]) for _ in range(vms)]
    others = [] if neighbour is None else [neighbour]
    return settings.condition(seed, scheduler or bfq(), alike + others)


def writer(cap_mb: int | None = None, weight: int = 100) -> Vm:
    """The noisy neighbour: 128 KiB writes at depth 64, as many as it can."""
    return vm([task(None, kib=128, reads=0.0, depth=64)], weight, cap_mb=cap_mb)


def reader(cap_mb: int | None = None, weight: int = 100) -> Vm:
    """The same, reading."""
    return vm([task(None, kib=128, reads=1.0, depth=64)], weight, cap_mb=cap_mb)


def condition_id(condition: Condition) -> str:
    """A hash of the condition's content."""
    text = json.dumps(condition, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Stratum:
    """All combinations of ``axes``, and what a combination means."""

    name: str
    axes: Sequence[Sequence[Any]]
    build: Callable[[Sequence[Any]], tuple[Scheduler, list[Vm]]]

    def sample(self, settings: Settings, size: int) -> Iterator[Condition]:
        """``size`` different combinations, or all of them if there are no more."""
        combinations = prod(len(axis) for axis in self.axes)
        drawn: set[int] = set()
        draw = 0
        while len(drawn) < min(size, combinations):
            digest = hashlib.sha256(f"{settings.seed}/{self.name}/{draw}".encode()).digest()
            draw += 1
            index = int.from_bytes(digest[:24], "big") % combinations
            if index in drawn:
                continue
            drawn.add(index)
            values = []
            for axis in self.axes:
                index, place = divmod(index, len(axis))
                values.append(axis[place])
            # 63 bits: a column of Parquet is signed.
            seed = int.from_bytes(digest[24:], "big") >> 1
            yield settings.condition(seed, *self.build(values))


def task_sets(tasks: int) -> list[list[Task]]:
    """All sets of so many of the paper's tasks."""
    sets = combinations_with_replacement(RATES, tasks)
    return [[task(rate) for rate in rates] for rates in sets]


def _table2() -> Iterator[Stratum]:
    bfqs = [bfq(idle, timeout) for idle in SLICE_IDLE_MS for timeout in TIMEOUT_SYNC_MS]

    def build(values: Sequence[Any]) -> tuple[Scheduler, list[Vm]]:
        host, guest, *rest = values
        pairs = zip(rest[::2], rest[1::2], strict=True)
        return host, [vm(tasks, weight, guest) for weight, tasks in pairs]

    for vms in VMS:
        for tasks in TASKS:
            of_vms: list[Sequence[Any]] = [WEIGHTS, task_sets(tasks)] * vms
            yield Stratum(f"table2/{vms}/{tasks}", [bfqs, bfqs, *of_vms], build)


def _neighbours(caps: Sequence[int]) -> dict[str, list[Vm | None]]:
    """Who else is on the host: nobody, or one VM that takes what it gets, or a cap in MB/s."""
    kinds = (writer, reader)
    return {
        "alone": [None],
        "flooded": [kind() for kind in kinds],
        "capped": [kind(cap, weight) for kind in kinds for cap in caps for weight in (10, 100)],
    }


def _bfqs(idles: Sequence[int], timeouts: Sequence[int]) -> list[Scheduler]:
    axes = product(idles, timeouts, (True, False), MAX_BUDGET)
    return [bfq(*values) for values in axes]


def _wide() -> Iterator[Stratum]:
    hosts: dict[str, list[Scheduler]] = {
        "idling": _bfqs(SLICE_IDLE_MS, TIMEOUT_SYNC_MS),
        "quiet": _bfqs([0], TIMEOUT_SYNC_MS),
        "none": [{"name": "none"}],
        "mq-deadline": [{"name": "mq-deadline"}],
        "kyber": [{"name": "kyber"}],
    }
    guests: list[Scheduler] = [{"name": "none"}, bfq(0), bfq(1), bfq(8, 32), bfq()]
    neighbours = _neighbours(CAPS_MB)

    def build(values: Sequence[Any]) -> tuple[Scheduler, list[Vm]]:
        host, guest, neighbour, *rest = values
        pairs = zip(rest[::2], rest[1::2], strict=True)
        vms = [vm(tasks, weight, guest) for weight, tasks in pairs]
        return host, vms if neighbour is None else [*vms, neighbour]

    for vms in VMS:
        for tasks in TASKS:
            for host, schedulers in hosts.items():
                for beside, neighbour in neighbours.items():
                    of_vms: list[Sequence[Any]] = [WEIGHTS, task_sets(tasks)] * vms
                    axes: list[Sequence[Any]] = [schedulers, guests, neighbour, *of_vms]
                    yield Stratum(f"wide/{vms}/{tasks}/{host}/{beside}", axes, build)


def _host() -> Iterator[Stratum]:
    """What the planner asks about: of guests it knows nothing. VMs alike, as in the 24 cases, and not."""
    # Three of five idle: it is there that tails spread, so that most has to be learned.
    hosts: dict[str, list[Scheduler]] = {
        **{f"idling-{timeout}": _bfqs(SLICE_IDLE_MS, [timeout]) for timeout in TIMEOUT_SYNC_MS},
        "quiet": _bfqs([0], TIMEOUT_SYNC_MS),
        "plain": [{"name": "none"}, {"name": "mq-deadline"}, {"name": "kyber"}],
    }
    neighbours = _neighbours(HOST_CAPS_MB)

    def build(values: Sequence[Any]) -> tuple[Scheduler, list[Vm]]:
        host, neighbour, sets, *weights = values
        vms = [vm(tasks, weight) for tasks, weight in zip(sets, weights, strict=True)]
        return host, vms if neighbour is None else [*vms, neighbour]

    for vms in VMS:
        for tasks in TASKS:
            of_tasks = task_sets(tasks)
            alike = [(tasks_of_one,) * vms for tasks_of_one in of_tasks]
            mixed = list(product(of_tasks, repeat=vms))
            for kind, sets in (("alike", alike), ("mixed", mixed)):
                if kind == "mixed" and vms == 1:
                    continue
                for host, schedulers in hosts.items():
                    for beside, neighbour in neighbours.items():
                        axes: list[Sequence[Any]] = [schedulers, neighbour, sets, *[WEIGHTS] * vms]
                        yield Stratum(f"host/{vms}/{tasks}/{kind}/{host}/{beside}", axes, build)


def shown(settings: Settings) -> Iterator[tuple[str, str, Condition]]:
    """What Figs. 2 and 5 show: (figure, which of its places, condition), each with 30 seeds."""

    def four(tasks: list[Task], weights: Sequence[int] = (100,) * 4) -> list[Vm]:
        return [vm(tasks, weight, bfq()) for weight in weights]

    heavy = [task(1500.0)]
    places: list[tuple[str, str, Scheduler, list[Vm]]] = []
    for tasks in TASKS:
        reads = [task(1500.0, reads=1.0)] * tasks
        places.append(("fig2", f"1/{tasks}", bfq(), [vm(reads, guest=bfq())]))
        places.append(("fig2", f"4/{tasks}", bfq(), four(reads)))
    for idle in SLICE_IDLE_MS:
        for timeout in TIMEOUT_SYNC_MS:
            places.append(("fig5a", f"{idle}/{timeout}", bfq(idle, timeout), four(heavy)))
    for weight in WEIGHTS:
        places.append(("fig5b", f"{weight}", bfq(), four(heavy, (weight, 100, 100, 100))))
    for rate in RATES:
        places.append(("fig5c", f"{rate:.0f}", bfq(), four([task(rate)] * 3)))
    for figure, place, host, vms in places:
        for repetition in range(REPETITIONS):
            text = f"{settings.seed}/{figure}/{place}/{repetition}"
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
            yield figure, place, settings.condition(seed, host, vms)


_STRATA = {"table2": _table2, "wide": _wide, "host": _host}


def conditions(settings: Settings) -> dict[str, Condition]:
    """All of a grid by id, in the order of ids: as good as random, and the same everywhere."""
    if settings.grid == "figures":
        made = [condition for _, _, condition in shown(settings)]
    else:
        strata = list(_STRATA[settings.grid]())
        share = -(-(settings.size or SIZES[settings.grid]) // len(strata))
        made = [condition for s in strata for condition in s.sample(settings, share)]
    return dict(sorted((condition_id(condition), condition) for condition in made))
