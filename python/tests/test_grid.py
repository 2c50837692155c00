import dataclasses
from collections import Counter

import pytest

from rtvirtio import grid
from rtvirtio.grid import Settings
from rtvirtio.types import Condition


@pytest.fixture(scope="module")
def table2() -> list[Condition]:
    return list(grid.conditions(Settings("table2")).values())


def test_table2_has_28000_different_conditions(table2: list[Condition]) -> None:
    # 12 strata of 2,334 each.
    assert len(table2) == 28_008
    assert Counter(len(c["vms"]) for c in table2) == dict.fromkeys((1, 2, 3, 4), 7002)
    tasks = Counter(len(vm["tasks"]) for c in table2 for vm in c["vms"][:1])
    assert tasks == dict.fromkeys((1, 2, 3), 9336)


def test_table2_has_every_value_of_the_papers_table_and_no_other(table2: list[Condition]) -> None:
    vms = [vm for c in table2 for vm in c["vms"]]
    assert {vm["weight"] for vm in vms} == {50, 100, 150, 250, 300, 500, 700}
    assert {t["iops"] for vm in vms for t in vm["tasks"]} == {100, 500, 1500}
    hosts = [c["service"]["scheduler"] for c in table2 if c["service"]["kind"] == "kernel"]
    guests = [vm.get("guest") for vm in vms]
    for bfqs in (hosts, guests):
        of_bfq = [b for b in bfqs if b is not None and b["name"] == "bfq"]
        assert len(of_bfq) == len(bfqs)
        assert {b["slice_idle_us"] for b in of_bfq} == {1000, 2000, 4000, 6000, 8000}
        assert {b["timeout_sync_ms"] for b in of_bfq} == {32, 64, 124}
        assert {(b["low_latency"], b["max_budget"]) for b in of_bfq} == {(True, 0)}


def test_wide_has_what_the_paper_leaves_out() -> None:
    found = grid.conditions(Settings("wide", size=1800)).values()
    schedulers = [c["service"]["scheduler"] for c in found if c["service"]["kind"] == "kernel"]
    # 36 of 180 strata for each; bfq has two: idling and not.
    assert Counter(s["name"] for s in schedulers) == {
        "bfq": 720, "none": 360, "mq-deadline": 360, "kyber": 360,
    }  # fmt: skip
    bfqs = [s for s in schedulers if s["name"] == "bfq"]
    assert {b["slice_idle_us"] for b in bfqs} >= {0, 8000}
    assert {b["max_budget"] for b in bfqs} == {0, 64, 512, 4096}
    unrated = [[t for t in c["vms"][-1]["tasks"] if t["iops"] is None] for c in found]
    assert Counter(map(len, unrated)) == {0: 600, 1: 1200}


def test_larger_grid_of_the_same_seed_holds_the_smaller() -> None:
    small, large = (grid.conditions(Settings("table2", size=size)) for size in (120, 240))
    assert len(small) == 120
    assert len(large) == 240
    assert small.keys() < large.keys()
    assert not small.keys() & grid.conditions(Settings("table2", size=120, seed=2)).keys()


def test_grid_is_the_same_everywhere() -> None:
    # A change of this makes campaigns that were begun before it unusable.
    ids = list(grid.conditions(Settings("table2", size=12)))
    assert ids[:2] == ["06974a5fd3772425f7ffef4448919e4a", "07b7b01f641302b4b3a865e28af80a99"]
    assert ids == sorted(ids)


def test_stratum_smaller_than_its_share_is_taken_whole() -> None:
    stratum = grid.Stratum("s", [["a", "b"], [1, 2, 3]], lambda v: (grid.bfq(), [grid.vm([], v[1])]))
    drawn = [c["vms"][0]["weight"] for c in stratum.sample(Settings("table2"), 100)]
    assert sorted(drawn) == [1, 1, 2, 2, 3, 3]


def test_host_is_what_the_planner_asks_about() -> None:
    found = list(grid.conditions(Settings("host", size=3150)).values())
    # 315 strata: a lone VM is no different from itself.
    assert len(found) > 3000
    assert all(vm["guest"] is None for c in found for vm in c["vms"])
    schedulers = [c["service"]["scheduler"] for c in found if c["service"]["kind"] == "kernel"]
    assert {s["name"] for s in schedulers} == {"bfq", "none", "mq-deadline", "kyber"}
    idling = [s for s in schedulers if s["name"] == "bfq" and s["slice_idle_us"] > 0]
    assert len(idling) / len(found) == pytest.approx(0.6, abs=0.02)
    # Half of those with several VMs have VMs whose tasks are alike.
    rated = [[vm["tasks"] for vm in c["vms"] if vm["tasks"][0]["iops"] is not None] for c in found]
    alike = [all(tasks == of[0] for tasks in of) for of in rated if len(of) > 1]
    assert 0.5 <= sum(alike) / len(alike) < 0.75


def test_settings_that_make_no_grid_are_refused() -> None:
    with pytest.raises(ValueError, match=r"grid: 'table9' is none of table2, wide, host, figures"):
        Settings("table9")
    with pytest.raises(ValueError, match="not negative"):
        dataclasses.replace(Settings("table2"), size=-1)
