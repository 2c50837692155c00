"""Campaigns: every condition of a grid, simulated once, on as many cores and machines as there are.

Dask runs the conditions: a local cluster by default, one process a core, or any scheduler whose
address is given. Workers simulate and give back rows; this process alone writes them, part by part
(`rtvirtio.parts`). So workers need no common disk, and a campaign is resumed by what is on disk: a
condition whose id is in a whole part is done, all others are not.

Properties (tests in test_campaign.py): a campaign that is killed loses no more than the parts that
were running and repeats none; a worker that dies is replaced and its part runs again; a damaged part
is named, set aside and redone.
"""

import fcntl
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TextIO

import pyarrow as pa
from distributed import Client, KilledWorker, LocalCluster, as_completed, get_worker

from rtvirtio import _core, grid, parts
from rtvirtio.types import Condition

#: Of campaign.json.
FORMAT = 1
#: Conditions of a part: some seconds of work, so that a kill costs little.
PART = 100
#: Requests a second of a task without a rate, for the estimate alone.
UNRATED_IOPS = 3000.0

Part = list[tuple[str, Condition]]


class CampaignError(ValueError):
    """Why a campaign cannot start or go on, with what to do about it."""


def simulate_part(part: Part) -> tuple[str, pa.Table]:
    """What a worker does: its address and the rows."""
    made: list[dict[str, object]] = []
    for id, condition in part:
        try:
            made += parts.rows(id, condition, _core.simulate(condition))
        except ValueError as error:
            raise ValueError(f"condition {id}: {error}") from error
    return get_worker().address, parts.table(made)


def _timed(condition: Condition) -> float:
    start = time.perf_counter()
    _core.simulate(condition)
    return time.perf_counter() - start


def _version() -> str:
    return _core.__version__


def requests(condition: Condition) -> float:
    """How many requests a condition simulates, roughly."""
    seconds = _core.expected_ns(condition) / grid.SECOND
    tasks = [task for vm in condition["vms"] for task in vm["tasks"]]
    rates = [UNRATED_IOPS if task["iops"] is None else task["iops"] for task in tasks]
    return seconds * sum(rates)


@dataclass
class Summary:
    """How a campaign ended."""

    conditions: int
    done_before: int
    done: int = 0
    damaged: list[parts.Damaged] = field(default_factory=list)
    #: Parts that no worker survived, by their first condition.
    failed: list[str] = field(default_factory=list)
    #: Parts by the worker that ran them.
    workers: dict[str, int] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def complete(self) -> bool:
        """Whether every condition is on disk."""
        return self.done_before + self.done == self.conditions


class Progress:
    """How far a campaign is: one line that changes on a terminal, a line now and then in a log."""

    def __init__(self, total: float, out: TextIO | None = None) -> None:
        self._total, self._out = total, out or sys.stderr
        self._start = self._shown = time.monotonic()
        self._terminal = self._out.isatty()

    def show(self, done: int, conditions: int, work: float) -> None:
        """``done`` of ``conditions``, which is ``work`` of the total."""
        now = time.monotonic()
        if now - self._shown < (0.2 if self._terminal else 30.0) and done < conditions:
            return
        self._shown = now
        passed = now - self._start
        left = passed / work * (self._total - work) if work else 0.0
        line = (
            f"{done:,} of {conditions:,} conditions, {work / passed:,.0f} requests/s, {duration(left)} left"
        )
        self._out.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._out.flush()

    def end(self) -> None:
        """Leaves the line."""
        if self._terminal:
            self._out.write("\n")


def duration(seconds: float) -> str:
    """For people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """No other campaign writes to ``out``."""
    handle = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CampaignError(f"{out}: another campaign is writing there") from error
        yield
    finally:
        os.close(handle)


def _check_in(out: Path, settings: grid.Settings, ids: Sequence[str]) -> None:
    """Writes what the campaign is, or compares it with what was written."""
    here = {
        "format": FORMAT,
        "version": _core.__version__,
        "settings": settings.as_dict(),
        "conditions": len(ids),
        "ids": hashlib.sha256("\n".join(ids).encode()).hexdigest(),
    }
    path = out / "campaign.json"
    try:
        there = json.loads(path.read_text())
    except FileNotFoundError:
        staged = out / ".staged-campaign"
        staged.write_text(json.dumps(here, indent=2) + "\n")
        staged.rename(path)
        return
    except ValueError as error:
        raise CampaignError(f"{path}: {error}\nhint: take it away to start anew") from error
    if there != here:
        differ = [key for key in here if there.get(key) != here[key]]
        raise CampaignError(
            f"{out} holds another campaign: {', '.join(differ)} differ from {path}\n"
            "hint: resume with the same options, or use another directory"
        )


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that start in here leave Ctrl-C, which goes to all of a terminal's, to this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _client(scheduler: str | None, workers: int | None) -> Iterator[Client]:
    """A client of the scheduler at that address, or of a cluster of our own."""
    if scheduler is not None:
        try:
            client = Client(scheduler, timeout=10)
            client.wait_for_workers(1, timeout=60)
        except OSError as error:
            raise CampaignError(f"no Dask scheduler with a worker at {scheduler}: {error}") from error
        with client:
            yield client
        return
    with _without_interrupts():
        cluster = LocalCluster(
            n_workers=workers or len(os.sched_getaffinity(0)),
            threads_per_worker=1,
            # Any port: no other cluster is in its way.
            dashboard_address=":0",
            silence_logs=50,
        )
    with cluster, Client(cluster) as client:
        yield client


def _check_workers(client: Client) -> None:
    """Results of two versions do not mix."""
    hint = "hint: install the same wheel of rtvirtio for every worker"
    try:
        versions = client.run(_version)
    except Exception as error:  # Whatever a worker without the package says.
        raise CampaignError(f"a worker cannot simulate: {error}\n{hint}") from error
    other = [f"{worker} has {v}" for worker, v in versions.items() if v != _core.__version__]
    if other:
        raise CampaignError(f"this is {_core.__version__}, but {', '.join(other)}\n{hint}")


def estimate(client: Client, conditions: Sequence[Condition]) -> tuple[float, float]:
    """(requests, seconds) that ``conditions`` take on the client's workers.

    By a few of them, evenly spaced from the cheapest to the dearest, run at once on all workers.
    """
    by_cost = sorted(conditions, key=requests)
    cores = sum(client.nthreads().values())
    count = min(len(by_cost), 8 * cores)
    sample = [by_cost[(2 * i + 1) * len(by_cost) // (2 * count)] for i in range(count)]
    seconds = sum(client.gather(client.map(_timed, sample, pure=False)))
    total = sum(map(requests, by_cost))
    return total, seconds / sum(map(requests, sample)) * total / cores


def run(
    settings: grid.Settings,
    out: Path,
    *,
    conditions: dict[str, Condition] | None = None,
    scheduler: str | None = None,
    workers: int | None = None,
    part: int = PART,
    say: Callable[[str], object] = print,
) -> Summary:
    """Simulates what of the grid (or of ``conditions``, by id) is not yet in ``out``, on a cluster of
    ``workers`` processes (one a core) or on the Dask scheduler at an address.
    """
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        wanted = grid.conditions(settings) if conditions is None else conditions
        _check_in(out, settings, list(wanted))
        parts.clear_staged(out)
        summary = Summary(len(wanted), 0)
        found: set[str] = set()
        for table in parts.each(out, summary.damaged):
            found.update(table["id"].unique().to_pylist())
        for damaged in summary.damaged:
            say(f"{damaged}; its conditions run again")
        summary.done_before = len(found)
        left = [(id, condition) for id, condition in wanted.items() if id not in found]
        if left:
            with _client(scheduler, workers) as client:
                _check_workers(client)
                total, seconds = estimate(client, [condition for _, condition in left])
                cores = sum(client.nthreads().values())
                say(
                    f"{settings.grid}: {len(left):,} of {len(wanted):,} conditions to run, "
                    f"{total:.2g} requests; about {duration(seconds)} on {cores} cores"
                )
                try:
                    _collect(client, left, out, part, total, summary)
                except KeyboardInterrupt:
                    summary.interrupted = True
        for failed in summary.failed:
            say(f"{failed}: no worker survived its part")
        say(f"{summary.done_before + summary.done:,} of {len(wanted):,} conditions are in {out}")
    return summary


def _collect(client: Client, left: Part, out: Path, size: int, total: float, summary: Summary) -> None:
    """Runs ``left`` in parts, a few ahead of the workers, and writes each as it comes."""
    chunks = iter([left[i : i + size] for i in range(0, len(left), size)])
    progress = Progress(total)
    running: dict[object, Part] = {}
    work = 0.0

    def submit(chunk: Part) -> object:
        future = client.submit(simulate_part, chunk, pure=False)
        running[future.key] = chunk
        return future

    ahead = 2 * sum(client.nthreads().values())
    waiting = as_completed([submit(chunk) for chunk in islice(chunks, ahead)])
    try:
        for future in waiting:
            chunk = running.pop(future.key)
            try:
                worker, table = future.result()
            except KilledWorker:
                summary.failed.append(f"conditions {chunk[0][0]} to {chunk[-1][0]}")
            else:
                parts.write(out, table)
                summary.done += len(chunk)
                summary.workers[worker] = summary.workers.get(worker, 0) + 1
                work += sum(requests(condition) for _, condition in chunk)
                progress.show(summary.done, len(left), work)
            future.release()
            for chunk in islice(chunks, 1):
                waiting.add(submit(chunk))
    finally:
        progress.end()
