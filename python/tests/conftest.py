"""What several tests use."""

from pathlib import Path

import pytest

from rtvirtio import campaign, grid

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "docs/results/strict/profile.json"

#: Short windows: what is tested here is not the simulator.
SMALL = grid.Settings("table2", size=36, window=2.5, longest=1.0)


@pytest.fixture(scope="session")
def trainable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished campaign, large enough to train on."""
    out = tmp_path_factory.mktemp("trainable")
    settings = grid.Settings("table2", size=600, window=4.0, longest=1.0)
    summary = campaign.run(settings, out, say=lambda _: None)
    assert summary.complete
    return out
