from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rtvirtio
from rtvirtio import grid, parts


def table(seed: int = 1) -> pa.Table:
    condition = grid.one(vms=1, rates=[100, 500], seed=seed)
    condition["length"] = {"at_least": 4 * grid.SECOND, "at_most": 4 * grid.SECOND}
    id = grid.condition_id(condition)
    return parts.table(parts.rows(id, condition, rtvirtio.simulate(condition)))


def test_rows_of_a_condition_are_its_tasks() -> None:
    light, medium = table().to_pylist()
    assert (light["vm"], light["task"], light["requested_iops"]) == (0, 0, 100)
    # 400 samples leave 4 beyond p99, which is too few; 2,000 leave 20.
    assert (light["percentile"], light["value_ns"]) == (None, None)
    assert light["p99_ns"] > light["p50_ns"] > 250_000
    assert (medium["percentile"], medium["n"]) == (99.0, 2000)
    assert medium["low_ns"] <= medium["value_ns"] == medium["p99_ns"] <= medium["high_ns"]
    assert medium["feature_task_iops"] == 500
    assert medium["version"] == rtvirtio.__version__


def test_part_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = parts.write(tmp_path, table())
    assert parts.read(written).equals(table())
    assert [p.name for p in tmp_path.iterdir()] == [written.name]
    assert parts.load(tmp_path).equals(table())


def test_part_that_was_cut_short_is_named_and_set_aside(tmp_path: Path) -> None:
    whole = parts.write(tmp_path, table(1))
    cut = parts.write(tmp_path, table(2))
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{cut.name}.*SHA-256") as caught:
        parts.load(tmp_path)
    assert "hint: run the campaign again" in str(caught.value)
    damaged: list[parts.Damaged] = []
    assert [t.equals(table(1)) for t in parts.each(tmp_path, damaged)] == [True]
    assert [d.name for d in damaged] == [cut.name]
    assert (tmp_path / "damaged" / cut.name).exists()
    assert not cut.exists()
    assert whole.exists()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_part_with_one_bit_changed_is_refused(tmp_path: Path, place: float, bit: int) -> None:
    path = parts.write(tmp_path, table())
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(ValueError, match="SHA-256"):
        parts.read(path)
    path.unlink()


def test_file_that_is_no_part_is_refused_although_its_name_fits(tmp_path: Path) -> None:
    import hashlib

    path = tmp_path / f"part-{hashlib.sha256(b'no').hexdigest()}.parquet"
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match="not Parquet"):
        parts.read(path)
    other = parts.write(tmp_path, pa.table({"a": [1]}).append_column("id", pa.array(["x"])))
    with pytest.raises(ValueError, match="columns"):
        parts.read(other)


def test_what_was_staged_and_not_renamed_is_nothing(tmp_path: Path) -> None:
    (tmp_path / ".staged-1").write_bytes(b"half")
    parts.clear_staged(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="no part of a campaign is there"):
        parts.load(tmp_path)
