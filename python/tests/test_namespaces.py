"""A campaign on two workers that are as good as other machines: each has its own network."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import SMALL

from rtvirtio import campaign, grid, parts

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and `ip` (Debian: iproute2)",
)

NAMED = Path("/run/netns")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def named_namespaces_are_mounted() -> bool:
    # Not os.path.ismount: a directory that is mounted on itself has its parent's device.
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(mount.split()[4] == str(NAMED) for mount in mounts)


def forget_named_namespaces() -> None:
    """`ip netns add` mounts its directory on itself, and `ip netns del` leaves that."""
    if named_namespaces_are_mounted() and not any(NAMED.iterdir()):
        subprocess.run(["umount", str(NAMED)], check=True)
        NAMED.rmdir()


@pytest.fixture
def scheduler() -> Iterator[str]:
    """The address of a scheduler here with a worker in each of two namespaces."""
    tag = f"rtv{os.getpid() % 10000}"
    with ExitStack() as stack:
        if not named_namespaces_are_mounted():
            stack.callback(forget_named_namespaces)
        for number in (1, 2):
            namespace, outer, inner = f"{tag}-{number}", f"{tag}o{number}", f"{tag}i{number}"
            try:
                ip("netns", "add", namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here: {error.stderr}")
            stack.callback(ip, "netns", "del", namespace)
            ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
            ip("addr", "add", f"10.211.{number}.1/24", "dev", outer)
            ip("link", "set", outer, "up")
            ip("-n", namespace, "addr", "add", f"10.211.{number}.2/24", "dev", inner)
            ip("-n", namespace, "link", "set", inner, "up")
            ip("-n", namespace, "route", "add", "default", "via", f"10.211.{number}.1")

        def start(*command: str) -> None:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        dask = [sys.executable, "-m", "dask"]
        port = "18786"
        start(*dask, "scheduler", "--host", "0.0.0.0", "--port", port, "--dashboard-address", ":0")  # noqa: S104
        for number in (1, 2):
            address = f"tcp://10.211.{number}.1:{port}"
            own = ["--host", f"10.211.{number}.2", "--name", f"machine-{number}", "--no-dashboard"]
            threads = ["--nworkers", "1", "--nthreads", "1"]
            start("ip", "netns", "exec", f"{tag}-{number}", *dask, "worker", address, *own, *threads)
        yield f"tcp://127.0.0.1:{port}"


def test_campaign_on_workers_in_two_network_namespaces_is_the_one_at_home(
    scheduler: str, tmp_path: Path
) -> None:
    from distributed import Client

    deadline = time.monotonic() + 60
    while True:
        try:
            with Client(scheduler, timeout=5) as client:
                client.wait_for_workers(2, timeout=60)
            break
        except OSError:
            assert time.monotonic() < deadline, "the scheduler does not start"
    away, home = tmp_path / "away", tmp_path / "home"
    summary = campaign.run(SMALL, away, scheduler=scheduler, part=4, say=lambda _: None)
    assert summary.complete
    assert named_namespaces_are_mounted()
    # Both have worked, each at its own address.
    assert {worker.split(":")[1] for worker in summary.workers} == {"//10.211.1.2", "//10.211.2.2"}
    campaign.run(SMALL, home, say=lambda _: None)
    assert set(grid.conditions(SMALL)) == set(parts.load(away)["id"].to_pylist())
    keys = [("id", "ascending"), ("vm", "ascending"), ("task", "ascending")]
    assert parts.load(away).sort_by(keys).equals(parts.load(home).sort_by(keys))
