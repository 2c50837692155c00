"""The documentation's example is run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT


def test_example_runs_without_a_warning_and_draws_a_figure(tmp_path: Path) -> None:
    text = (ROOT / "docs/python.md").read_text()
    [example] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    done = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "vm3/heavy: bound " in done.stdout
    assert "360 of 360 conditions are in example/campaign" in done.stdout
    figure = (tmp_path / "example/fig6.svg").read_text()
    assert "simulated − predicted, ms" in figure
    assert (tmp_path / "example/trained/mlp.onnx").stat().st_size > 10_000
