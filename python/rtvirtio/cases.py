"""The 24 cases under each scheme, simulated: the paper's Fig. 8.

A run passes if every task with a target does: its judged percentile is within the target, and it
delivered 0.95 of its rate (``rtvirtio_cases::judge``). A plan that says that a target cannot be met is a
refusal: a miss, whatever its run shows; runs that met their targets all the same are counted beside.

Schemes: the paper's baselines and the planner's settings by three models (`analytical` is the paper's, `mlp`
a trained file, `structural` the product's own), all on the kernel's block layer; and the data plane's own
schedule. All schemes of a case and repetition have one seed.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtvirtio import _core, grid, parts
from rtvirtio.types import Condition, DeviceSettings, Priority, Profile

if TYPE_CHECKING:
    from rtvirtio.campaign import Summary

BASELINES = ("bfq", "ionice", "rt-xen")
PLANNED = ("analytical", "mlp", "structural")
SCHEMES = (*BASELINES, *PLANNED, "data-plane")
#: The paper's averages over its 24 cases, % (section VII).
PAPER = {"bfq": 40.42, "ionice": 48.96, "rt-xen": 38.54, "analytical": 69.03, "mlp": 69.44}
MIXES = ("L", "M", "H", "L+M", "M+H", "L+M+H")
CASES = tuple(f"{vms}x{mix}" for vms in grid.VMS for mix in MIXES)
#: Part of its rate that a task must deliver.
DELIVERED = 0.95
REPETITIONS = 20
#: What the specification's device is called.
DEVICE = "scratch"
#: Runs of a part of the campaign: a minute or so.
PART = 20


@dataclass(frozen=True)
class Run:
    """One scheme on one case."""

    case: str
    scheme: str
    repetition: int
    #: Why targets cannot be met, as the plan has it.
    refused: list[str]
    id: str


def runs(
    settings: grid.Settings,
    profile: Profile,
    onnx: bytes | None,
    *,
    tier: str = "paper",
    neighbour: str = "none",
    repetitions: int = REPETITIONS,
) -> Iterator[tuple[Run, Condition]]:
    """Every run with its condition; without a trained file there is no scheme `mlp`."""
    capacity: Any = profile["capacity"]
    for case in CASES:
        specification = _core.case(case, tier, neighbour, round(settings.window * grid.SECOND))
        for scheme in SCHEMES:
            if scheme == "mlp" and onnx is None:
                continue
            refused: list[str] = []
            priorities: dict[str, Priority] = {}
            if scheme in PLANNED:
                plan = _core.plan(
                    specification,
                    {DEVICE: profile},
                    onnx=onnx if scheme == "mlp" else None,
                    model="analytical" if scheme == "analytical" else "structural",
                )
                chosen = plan["settings"][DEVICE]
                refused = [task["unmet"]["cause"] for task in plan["tasks"] if task["unmet"] is not None]
            else:
                # The data plane gets weights and limits of nobody.
                name = "none" if scheme == "data-plane" else scheme
                made = _core.scheme(name, specification, capacity["iops_4k"])
                chosen, priorities = made["settings"][DEVICE], made["priorities"]
            for repetition in range(repetitions):
                condition = _condition(settings, specification, chosen, priorities, scheme, case, repetition)
                run = Run(case, scheme, repetition, refused, grid.condition_id(condition))
                yield run, condition


def _condition(
    settings: grid.Settings,
    specification: str,
    chosen: DeviceSettings,
    priorities: dict[str, Priority],
    scheme: str,
    case: str,
    repetition: int,
) -> Condition:
    text = f"{settings.seed}/{case}/{repetition}"
    window = round(settings.window * grid.SECOND)
    return _core.condition(
        specification,
        chosen,
        DEVICE,
        _core.device(settings.device),
        {"at_least": window, "at_most": window},
        seed=int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1,
        warm_up_ns=round(settings.warm_up * grid.SECOND),
        nesting=settings.nesting,
        transport_ns=round(settings.transport * 1000),
        software_ns=round(settings.software * 1000),
        priorities=priorities,
        data_plane=scheme == "data-plane",
    )


def run(
    out: Path,
    settings: grid.Settings,
    made: Sequence[tuple[Run, Condition]],
    *,
    scheduler: str | None = None,
    workers: int | None = None,
    say: Callable[[str], object] = print,
) -> "Summary":
    """Simulates what of `runs` is not yet in ``out``, as `campaign.run` does; then judges them."""
    from rtvirtio import campaign

    # Two schemes may have chosen the same: one condition is then both's.
    conditions = dict(sorted((run.id, condition) for run, condition in made))
    summary = campaign.run(
        settings, out, conditions=conditions, scheduler=scheduler, workers=workers, part=PART, say=say
    )
    if summary.complete:
        (out / "runs.json").write_text(json.dumps([asdict(run) for run, _ in made]) + "\n")
        verdicts = judge(out)
        (out / "cases.json").write_text(json.dumps([asdict(v) for v in verdicts], indent=1) + "\n")
        (out / "table.txt").write_text(text(verdicts))
    return summary


@dataclass(frozen=True)
class Verdict:
    """How a scheme did in a case."""

    case: str
    scheme: str
    runs: int
    #: Runs whose targets were met.
    met: int
    #: Of these, those that the plan had not refused.
    passed: int


def judge(directory: Path) -> list[Verdict]:
    """What the runs in a directory came to, in the order of cases and schemes."""
    columns = ["id", "vm", "task", "condition", "requested_iops", "delivered_iops", "value_ns"]
    missed: dict[str, bool] = {}
    for row in parts.load(directory).select(columns).to_pylist():
        task = json.loads(row["condition"])["vms"][row["vm"]]["tasks"][row["task"]]
        target = task.get("deadline")
        misses = target is not None and (
            row["value_ns"] is None
            or row["value_ns"] > target
            or row["delivered_iops"] < DELIVERED * row["requested_iops"]
        )
        missed[row["id"]] = missed.get(row["id"], False) or misses
    counts: dict[tuple[str, str], list[int]] = {}
    for run in json.loads((directory / "runs.json").read_text()):
        count = counts.setdefault((run["case"], run["scheme"]), [0, 0, 0])
        met = not missed[run["id"]]
        count[0] += 1
        count[1] += met
        count[2] += met and not run["refused"]
    return [Verdict(case, scheme, *count) for (case, scheme), count in counts.items()]


def read(directory: Path) -> list[Verdict]:
    """What `run` wrote."""
    return [Verdict(**verdict) for verdict in json.loads((directory / "cases.json").read_text())]


def read_cells(path: Path) -> list[dict[str, Any]]:
    """Cells of `rtvirtio-lab bench`: JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def averages(verdicts: list[Verdict]) -> dict[str, tuple[float, float, float]]:
    """Each scheme's runs that passed, %, with Wilson's 95 % interval."""
    found = {}
    for scheme in dict.fromkeys(v.scheme for v in verdicts):
        of = [v for v in verdicts if v.scheme == scheme]
        passed, total = sum(v.passed for v in of), sum(v.runs for v in of)
        found[scheme] = (100 * passed / total, *wilson(passed, total))
    return found


def wilson(passed: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a proportion, %."""
    z, p = 1.959964, passed / total
    middle = p + z * z / (2 * total)
    half = z * (p * (1 - p) / total + z * z / (4 * total * total)) ** 0.5
    scale = 1 + z * z / total
    # Rounding must not put the proportion outside.
    return 100 * min(p, (middle - half) / scale), 100 * max(p, (middle + half) / scale)


def text(verdicts: list[Verdict]) -> str:
    """A table: runs passed, %; in brackets those met although they were refused."""
    schemes = list(dict.fromkeys(v.scheme for v in verdicts))
    by_place = {(v.case, v.scheme): v for v in verdicts}
    lines = ["case      " + "".join(f"{scheme:>13}" for scheme in schemes)]
    for case in dict.fromkeys(v.case for v in verdicts):
        line = f"{case:<10}"
        for scheme in schemes:
            v = by_place[case, scheme]
            cell = f"{100 * v.passed / v.runs:.0f}"
            if v.met > v.passed:
                cell += f" ({100 * v.met / v.runs:.0f})"
            line += f"{cell:>13}"
        lines.append(line)
    means = averages(verdicts)
    lines.append("average   " + "".join(f"{means[scheme][0]:>13.2f}" for scheme in schemes))
    intervals = [f"{low:.0f}-{high:.0f}" for _, low, high in (means[scheme] for scheme in schemes)]
    lines.append("95 %      " + "".join(f"{interval:>13}" for interval in intervals))
    paper = [f"{PAPER[scheme]:.2f}" if scheme in PAPER else "-" for scheme in schemes]
    lines.append("the paper " + "".join(f"{value:>13}" for value in paper))
    return "\n".join(lines) + "\n"
