import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from rtvirtio.__main__ import main


@pytest.mark.parametrize("verb", ["campaign", "train", "figures"])
def test_help_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([verb, "--help"])
    assert exited.value.code == 0
    assert f"python -m rtvirtio {verb} " in capsys.readouterr().out


def test_package_without_its_extras_imports_and_says_what_to_install(tmp_path: Path) -> None:
    # As if nothing else were installed.
    code = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"dask", "distributed", "numpy", "pyarrow", "sklearn"}:
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Nothing())
import rtvirtio
rtvirtio.simulate(rtvirtio.grid.one(rates=[100]))
from rtvirtio.__main__ import main
sys.exit(main(["campaign", "table2", "--out", sys.argv[1]]))
"""
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No module named" in done.stderr
    assert "hint: pip install 'rtvirtio[all]'" in done.stderr


def test_figures_without_data_leave_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = str(ROOT / "docs/results/strict/cells.jsonl")
    assert main(["figures", "--cells", cells, "--only", "fig7", "fig8", "--out", str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fig7.png", "fig7.svg", "fig8.png", "fig8.svg"]
    assert main(["figures", "--cells", cells, "--out", str(tmp_path)]) == 3
    assert "fig3: not drawn" in capsys.readouterr().out


def test_error_is_one_line_and_leaves_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert f"error: {tmp_path}: no part of a campaign is there" in capsys.readouterr().err
    assert main(["campaign", "table2", "--device", "floppy", "--out", str(tmp_path)]) == 1
    assert 'no reference device "floppy"' in capsys.readouterr().err
