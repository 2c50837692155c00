import copy
import json
import math
import re
import threading
import time
from typing import Any

import pytest
from conftest import PROFILE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rtvirtio
from rtvirtio import grid
from rtvirtio.types import Condition, DeviceSettings, Length, PaperFit, Profile

SECOND = grid.SECOND
ONE_SECOND: Length = {"at_least": SECOND, "at_most": SECOND}


def short(vms: int = 2) -> Condition:
    condition = grid.one(vms=vms, rates=[100, 1500])
    condition["length"] = ONE_SECOND
    return condition


def profile() -> Profile:
    loaded: Profile = json.loads(PROFILE.read_text())
    return loaded


def test_device_of_a_name_is_the_reference_device() -> None:
    assert rtvirtio.device("ref-4x250") == {
        "channels": 4,
        "mean_service": 250_000,
        "sigma": 0.3,
        "length_slope": 0.15,
        "stalls": None,
    }
    with pytest.raises(ValueError, match=r"no reference device \"floppy\""):
        rtvirtio.device("floppy")


def test_same_condition_gives_the_same_outcome_and_another_seed_another() -> None:
    first = rtvirtio.simulate(short())
    assert rtvirtio.simulate(short()) == first
    assert rtvirtio.simulate({**short(), "seed": 2}) != first
    assert [len(tasks) for tasks in first["vms"]] == [2, 2]
    assert first["window"] == SECOND


def test_outcome_of_a_lone_light_task_is_its_rate_and_the_device() -> None:
    condition = grid.one(vms=1, rates=[100], scheduler={"name": "none"})
    outcome = rtvirtio.simulate({**condition, "length": {"at_least": 21 * SECOND, "at_most": 21 * SECOND}})
    [[task]] = outcome["vms"]
    assert task["delivered_iops"] == pytest.approx(100, rel=0.01)
    # Nobody else is there: 250 µs of the device, 85 on the way there and back, 40 of software.
    assert task["mean"] == pytest.approx(375_000, rel=0.05)
    judged = task["judged"]
    assert judged is not None
    # 2,100 samples leave 21 beyond p99 and 2 beyond p99.9.
    assert (judged["percentile"], judged["n"], judged["beyond"]) == (99.0, 2100, 21)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("vms", 0, "tasks", 1, "iops"), -1.0, r"vms\[0\]\.tasks\[1\]\.iops is out of range"),
        (("vms", 1, "tasks", 0, "iops"), math.nan, r"vms\[1\]\.tasks\[0\]\.iops is out of range"),
        (("vms", 0, "tasks", 0, "queue_depth"), 0, r"vms\[0\]\.tasks\[0\]\.queue_depth is out of range"),
        (("vms", 1, "weight"), 1001, r"^vms\[1\]\.weight: 1001 is outside 1\.\.=1000"),
        (("vms", 1, "weight"), "heavy", r"^vms\[1\]\.weight: "),
        (("vms", 0, "tasks", 0, "size"), 1, r"^vms\[0\]\.tasks\[0\]\.size: unknown field `size`"),
        (("device", "channels"), -4, r"^device\.channels: "),
        (("service", "kind"), "usb", r"^service.*unknown variant `usb`"),
        (("length", "at_most"), 1, r"^length: 0 < at_least <= at_most"),
        (("vms",), [], r"^0 VMs: 1 to 1024"),
    ],
)
def test_wrong_value_is_refused_with_its_path(path: tuple[Any, ...], value: object, message: str) -> None:
    condition: Any = copy.deepcopy(short())
    place = condition
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        rtvirtio.simulate(condition)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        steps = list(value.items())
    elif isinstance(value, list):
        steps = list(enumerate(value))
    else:
        return [path]
    return [path, *(leaf for step, inner in steps for leaf in _leaves(inner, (*path, step)))]


HOSTILE = [
    None,
    True,
    -1,
    0,
    2**63,
    2**64,
    10**30,
    math.nan,
    math.inf,
    -0.5,
    "",
    "x",
    b"x",
    [],
    {},
    [{}],
    object(),
]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(leaf=st.sampled_from(_leaves(short())[1:]), value=st.sampled_from(HOSTILE))
def test_hostile_value_is_refused_or_simulated_and_never_a_panic(
    leaf: tuple[Any, ...], value: object
) -> None:
    condition: Any = copy.deepcopy(short())
    place = condition
    for step in leaf[:-1]:
        place = place[step]
    place[leaf[-1]] = value
    try:
        outcome = rtvirtio.simulate(condition)
    except (ValueError, TypeError):
        return
    assert len(outcome["vms"]) == len(condition["vms"])


def test_other_threads_run_while_it_simulates() -> None:
    long = grid.one(vms=4)
    long["length"] = {"at_least": 600 * SECOND, "at_most": 600 * SECOND}
    thread = threading.Thread(target=rtvirtio.simulate, args=(long,))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    # Two or three if the simulation kept the interpreter to itself.
    assert turns > 20


def test_expected_time_is_what_the_slowest_task_needs() -> None:
    condition = grid.one(vms=1, rates=[100, 500], settings=grid.Settings("table2", percentile=99.9))
    # Ten of 10,000 requests lie beyond p99.9: 100 s at 100 a second, 1 s of warm-up, and 0.6 s until all
    # tasks have started.
    assert rtvirtio.expected_ns(condition) == 101_600_000_000


@pytest.mark.parametrize("key", ["transport", "software", "device.mean_service"])
@pytest.mark.parametrize("value", [10**18, 2**64 - 1, -1, math.nan])
def test_time_that_is_out_of_range_is_named(key: str, value: object) -> None:
    condition: Any = short()
    *way, last = key.split(".")
    place = condition
    for step in way:
        place = place[step]
    place[last] = value
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}\b"):
        rtvirtio.simulate(condition)


def test_features_of_a_condition_are_as_by_hand() -> None:
    condition = grid.one(vms=2, rates=[100, 1500], scheduler=grid.bfq(2, 64), neighbour=grid.writer(20))
    condition["vms"][0]["weight"] = 200
    condition["vms"][0]["guest"] = grid.bfq(4, 32)
    [row] = rtvirtio.features(condition, [(0, 1, 99.9)])
    named = dict(zip(rtvirtio.FEATURES, row, strict=True))
    assert named["vms"] == 3
    assert named["task_iops"] == 1500
    assert named["percentile_nines"] == pytest.approx(3)
    assert named["vm_weight"] == pytest.approx(0.5)
    assert (named["host_slice_idle_ms"], named["host_timeout_sync_ms"]) == (2, 64)
    assert (named["guest_slice_idle_ms"], named["guest_timeout_sync_ms"]) == (4, 32)
    assert named["others_cap_kib_per_s"] == 19531.25
    assert named["background_kib"] == 64 * 128
    assert rtvirtio.regime(row) == "idling"
    with pytest.raises(IndexError, match=r"vms\[3\]\.tasks\[0\] is not there"):
        rtvirtio.features(condition, [(3, 0, 99.0)])
    with pytest.raises(ValueError, match="percentile"):
        rtvirtio.features(condition, [(0, 0, 100.0)])


def test_paper_fit_recovers_the_lambdas_that_made_the_tails() -> None:
    truth: PaperFit = {"weight": 0.8, "timeout_sync": 2.0, "slice_idle": 0.3, "throughput": 245_000_000}
    conditions = []
    for timeout, weight in ((32, 100), (64, 300), (124, 700)):
        for idle in (2, 4, 8):
            condition = grid.one(vms=4, scheduler=grid.bfq(idle, timeout))
            condition["vms"][0]["weight"] = weight
            conditions.append(condition)
    tails = rtvirtio.paper_tails(truth, conditions)
    samples = [list(enumerate(of_vms)) for of_vms in tails]
    found = rtvirtio.paper_fit(conditions, samples, truth["throughput"])
    assert found["weight"] == pytest.approx(0.8, abs=0.01)
    assert found["timeout_sync"] == pytest.approx(2.0, abs=0.05)
    assert found["slice_idle"] == pytest.approx(0.3, abs=0.011)


def test_paper_tail_of_four_full_vms_is_1864_ms() -> None:
    # (8400 + 8192 - 4) / (0.5 · 0.36 · 0.25 · 245000) + (25200 + 8192) / (0.5 · 245000) + 0.7 · 0.124.
    [[tail, *_]] = rtvirtio.paper_tails(rtvirtio.table_iii(), [grid.one(vms=4)])
    assert tail / 1e6 == pytest.approx(1864, abs=1)
    with pytest.raises(ValueError, match="reading"):
        rtvirtio.paper_tails(rtvirtio.table_iii(), [], "upside-down")  # type: ignore[arg-type]


def test_plan_of_a_case_can_be_predicted_and_simulated() -> None:
    specification = rtvirtio.case("4xL+M+H", neighbour="writer")
    profiles = {"scratch": profile()}
    plan = rtvirtio.plan(specification, profiles)
    assert len(plan["tasks"]) == 12
    chosen = plan["settings"]["scratch"]
    predicted = rtvirtio.predict(specification, profiles, plan["settings"])
    assert [p["predicted"] for p in predicted] == [p["predicted"] for p in plan["tasks"]]
    device = rtvirtio.device("ref-4x250")
    condition = rtvirtio.condition(specification, chosen, "scratch", device, ONE_SECOND)
    assert [len(vm["tasks"]) for vm in condition["vms"]] == [3, 3, 3, 3, 1]
    assert condition["service"] == {"kind": "kernel", "scheduler": chosen["scheduler"]}
    assert len(rtvirtio.simulate(condition)["vms"]) == 5


def test_plan_without_a_profile_or_of_a_wrong_text_says_where() -> None:
    specification = rtvirtio.case("1xL")
    with pytest.raises(ValueError, match=r"device scratch: no profile scratch\.json"):
        rtvirtio.plan(specification, {})
    with pytest.raises(ValueError, match=r"scratch|capacity|version"):
        rtvirtio.plan(specification, {"scratch": {}})
    with pytest.raises(ValueError, match="specification"):
        rtvirtio.plan("version = 1\n[device", {})
    with pytest.raises(ValueError, match="a case has 1 to 4 VMs, not 5"):
        rtvirtio.case("5xL")


def test_settings_of_python_are_checked() -> None:
    wrong: DeviceSettings = {"scheduler": {"name": "cfq"}, "vms": {}}  # type: ignore[typeddict-item]
    device = rtvirtio.device("ref-4x250")
    with pytest.raises(ValueError, match="unknown variant `cfq`"):
        rtvirtio.condition(rtvirtio.case("1xL"), wrong, "scratch", device, ONE_SECOND)


def test_conformal_score_is_by_rank_whatever_the_order() -> None:
    # 19 scores allow 0.95 by the largest; one less allows none.
    scores = [float(i) for i in range(19)]
    assert rtvirtio.conformal(scores[::-1], 0.95) == pytest.approx(18)
    assert rtvirtio.conformal(scores[1:], 0.95) is None
    with pytest.raises(ValueError, match="confidence"):
        rtvirtio.conformal(scores, 1.5)
