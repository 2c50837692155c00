import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import dask
import pytest
from conftest import SMALL
from distributed import Client, LocalCluster

from rtvirtio import campaign, grid, parts

#: Some seconds on two workers.
LONGER = grid.Settings("table2", size=1200, window=2.5, longest=1.0)


def ids(out: Path) -> Counter[str]:
    """How many parts each condition is in."""
    found: Counter[str] = Counter()
    for path in out.glob("part-*.parquet"):
        found.update(parts.read(path)["id"].unique().to_pylist())
    return found


def wait_for_parts(out: Path, count: int, process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + 300
    while len(list(out.glob("part-*.parquet"))) < count:
        assert time.monotonic() < end, "no parts"
        assert process is None or process.poll() is None, "it ended before it was to be stopped"
        time.sleep(0.01)


def command(out: Path, settings: grid.Settings) -> list[str]:
    options = {"size": settings.size, "window": settings.window, "longest": settings.longest}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [
        sys.executable,
        "-W",
        "error",
        "-m",
        "rtvirtio",
        "campaign",
        settings.grid,
        "--out",
        str(out),
        *flags,
    ]


def start(out: Path, settings: grid.Settings) -> subprocess.Popen[str]:
    # A session of its own: signals go to the whole group, as a terminal's do.
    # A shell's background jobs ignore SIGINT, and this test may be part of one.
    return subprocess.Popen(
        ["env", "--default-signal=INT", *command(out, settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_campaign_simulates_each_condition_once(tmp_path: Path) -> None:
    said: list[str] = []
    summary = campaign.run(SMALL, tmp_path, part=10, say=said.append)
    assert summary.complete
    assert (summary.done_before, summary.done) == (0, 36)
    assert ids(tmp_path) == Counter(grid.conditions(SMALL).keys())
    assert len(list(tmp_path.glob("part-*.parquet"))) == 4
    # Its length is said before anything runs.
    assert said[0].startswith("table2: 36 of 36 conditions to run, ")
    assert "requests; about" in said[0]
    rows = parts.load(tmp_path).to_pylist()
    wanted = grid.conditions(SMALL)
    assert all(json.loads(row["condition"]) == wanted[row["id"]] for row in rows)
    # A second run has nothing to do.
    again = campaign.run(SMALL, tmp_path, say=said.append)
    assert (again.done_before, again.done, again.complete) == (36, 0, True)


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_campaign_that_is_stopped_goes_on_without_repeating_or_losing(
    tmp_path: Path, sign: signal.Signals, code: int
) -> None:
    out = tmp_path / "out"
    process = start(out, LONGER)
    wait_for_parts(out, 2, process)
    os.killpg(process.pid, sign)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    kept = {path.name for path in out.glob("part-*.parquet")}
    before = ids(out)
    assert 200 <= len(before) < 1200
    if sign == signal.SIGINT:
        assert "Traceback" not in errors
        assert "interrupted; run it again to go on" in errors
    summary = campaign.run(LONGER, out, say=lambda _: None)
    assert (summary.done_before, summary.done) == (len(before), 1200 - len(before))
    assert summary.complete
    assert kept <= {path.name for path in out.glob("part-*.parquet")}
    assert ids(out) == Counter(grid.conditions(LONGER).keys())
    assert not list(out.glob(".staged-*"))


def test_damaged_part_is_named_and_redone(tmp_path: Path) -> None:
    campaign.run(SMALL, tmp_path, part=10, say=lambda _: None)
    path = sorted(tmp_path.glob("part-*.parquet"))[1]
    lost = len(parts.read(path)["id"].unique())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    said: list[str] = []
    summary = campaign.run(SMALL, tmp_path, part=10, say=said.append)
    assert said[0].startswith(f"{path.name}: damaged (its bytes are not")
    assert said[0].endswith("its conditions run again")
    assert (summary.done_before, summary.done) == (36 - lost, lost)
    assert ids(tmp_path) == Counter(grid.conditions(SMALL).keys())


def test_worker_that_dies_is_replaced_and_its_part_runs_again(tmp_path: Path) -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50) as cluster,
        Client(cluster) as watcher,
    ):
        pids = watcher.run(os.getpid)

        def kill_one() -> None:
            wait_for_parts(tmp_path, 1)
            os.kill(next(iter(pids.values())), signal.SIGKILL)

        killer = threading.Thread(target=kill_one)
        killer.start()
        summary = campaign.run(LONGER, tmp_path, scheduler=cluster.scheduler_address, say=lambda _: None)
        killer.join()
        watcher.wait_for_workers(2, timeout=30)
        after = watcher.run(os.getpid)
    assert summary.complete
    assert summary.failed == []
    assert ids(tmp_path) == Counter(grid.conditions(LONGER).keys())
    assert len(after) == 2
    assert len(set(after.values()) - set(pids.values())) == 1


def test_part_that_no_worker_survives_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0", silence_logs=50) as cluster,
        Client(cluster) as watcher,
    ):
        [pid] = watcher.run(os.getpid).values()

        def kill_it() -> None:
            wait_for_parts(tmp_path, 1)
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_it)
        killer.start()
        said: list[str] = []
        summary = campaign.run(LONGER, tmp_path, scheduler=cluster.scheduler_address, say=said.append)
        killer.join()
    assert not summary.complete
    assert summary.failed
    assert any("no worker survived its part" in line for line in said)
    assert summary.done == len(ids(tmp_path)) > 0


def test_two_campaigns_do_not_write_to_one_directory(tmp_path: Path) -> None:
    with (
        campaign._alone(tmp_path),
        pytest.raises(campaign.CampaignError, match="another campaign is writing"),
    ):
        campaign.run(SMALL, tmp_path)


def test_campaign_of_other_settings_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    campaign.run(SMALL, tmp_path, say=lambda _: None)
    before = sorted(path.name for path in tmp_path.iterdir())
    other = grid.Settings("table2", size=36, window=2.5, longest=1.0, seed=2)
    with pytest.raises(campaign.CampaignError, match=r"holds another campaign: settings, ids differ"):
        campaign.run(other, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_scheduler_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(campaign.CampaignError, match=r"no Dask scheduler .* tcp://127\.0\.0\.1:9"):
        campaign.run(SMALL, tmp_path, scheduler="tcp://127.0.0.1:9", say=lambda _: None)


def test_requests_of_a_condition_are_its_rates_for_its_time() -> None:
    # 22.6 s of 4 × 2,100 requests a second, with the time in which tasks start; a writer counts as 3,000.
    assert campaign.requests(grid.one(vms=4)) == pytest.approx(22.6 * 8400)
    writing = grid.one(vms=1, rates=[500], neighbour=grid.writer())
    assert campaign.requests(writing) == pytest.approx(22.6 * 3500)


@pytest.mark.parametrize(("seconds", "text"), [(12.4, "12 s"), (600, "10 min"), (7200, "2.0 h")])
def test_duration_is_said_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert campaign.duration(seconds) == text
