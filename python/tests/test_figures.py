import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT

from rtvirtio import campaign, evaluate, figures, grid, parts, train

CELLS = ROOT / "docs/results/strict/cells.jsonl"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shown")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "REPETITIONS", 2)
        settings = grid.Settings("figures", window=4.0, longest=1.0)
        assert campaign.run(settings, out, say=lambda _: None).complete
    return out


@pytest.fixture(scope="module")
def sources(shown: Path, trainable: Path, tmp_path_factory: pytest.TempPathFactory) -> figures.Sources:
    out = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "STUDY_NEURONS", (1, 5))
        patch.setattr(evaluate, "STUDY_LAYERS", (1, 2))
        table = parts.load(trainable)
        train.train(table, out, shown=parts.load(shown), sizes=True, say=lambda _: None)
    return figures.read_sources(shown, out, CELLS)


@pytest.fixture(autouse=True)
def _repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "REPETITIONS", 2)


def test_all_figures_are_drawn_and_the_same_data_gives_the_same_bytes(
    sources: figures.Sources, tmp_path: Path
) -> None:
    said: list[str] = []
    assert figures.draw(sources, tmp_path / "a", say=said.append) == []
    assert len(said) == len(figures.NAMES) == 9
    assert figures.draw(sources, tmp_path / "b", say=lambda _: None) == []
    for name in figures.NAMES:
        svg = (tmp_path / "a" / f"{name}.svg").read_bytes()
        assert svg == (tmp_path / "b" / f"{name}.svg").read_bytes()
        assert (tmp_path / "a" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_figure_without_data_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    said: list[str] = []
    lacking = figures.draw(figures.Sources(), tmp_path, say=said.append)
    assert lacking == list(figures.NAMES)
    assert said[0] == "fig2: not drawn, for there is no campaign of the grid `figures`"
    assert said[1] == "fig3: not drawn, for there is no training.json of `train`"
    assert said[7] == "fig8: not drawn, for there is no run of `cases`, nor a cell (`rtvirtio-lab bench`)"
    assert list(tmp_path.iterdir()) == []


def test_condition_that_is_missing_keeps_its_figure_from_being_drawn(
    sources: figures.Sources, tmp_path: Path
) -> None:
    assert sources.shown is not None
    fewer = dataclasses.replace(sources, shown=sources.shown.slice(0, 20))
    said: list[str] = []
    assert figures.draw(fewer, tmp_path, ["fig5a"], said.append) == ["fig5a"]
    assert "the campaign's condition" in said[0]


def test_boxes_of_fig5a_are_of_its_conditions_alone(sources: figures.Sources) -> None:
    tails = sources.tails("fig5a")
    # 15 places, 2 seeds of 4 VMs with a task each.
    assert [len(found) for found in tails.values()] == [8] * 15
    assert next(iter(tails)) == "1/32"
    assert sources.tails("fig2").keys() == {f"{v}/{t}" for v in (1, 4) for t in (1, 2, 3)}


def test_fig8_has_the_pass_rates_of_the_cells(sources: figures.Sources) -> None:
    cells: list[dict[str, Any]] = [json.loads(line) for line in CELLS.read_text().splitlines()]
    hand = [c["passed"] for c in cells if c["key"]["case"] == "4xH" and c["key"]["scheme"] == "hand"]
    [axes] = figures.fig8(sources).axes
    cases = [label.get_text() for label in axes.get_xticklabels()]
    bars = next(c for c in axes.containers if c.get_label() == "hand")
    heights = [patch.get_height() for patch in bars]
    assert heights[cases.index("4xH")] == pytest.approx(100 * np.mean(hand))


def test_fig6_counts_overestimates_on_the_left(sources: figures.Sources, tmp_path: Path) -> None:
    table = pq.read_table(sources.training / "predictions.parquet")  # type: ignore[operator]
    made = dict.fromkeys([f"{model}_ms" for model in figures.MODELS], np.full(len(table), 200.0))
    for name in ("mlp_ms", "boosting_ms"):
        made[name] = np.full(len(table), 50.0)
    changed = table.set_column(
        table.column_names.index("measured_ms"), "measured_ms", [np.full(len(table), 100.0)]
    )
    for name, values in made.items():
        changed = changed.set_column(changed.column_names.index(name), name, [values])
    pq.write_table(changed, tmp_path / "predictions.parquet")
    [axes] = figures.fig6(figures.Sources(training=tmp_path)).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    assert "paper (0% too low)" in labels
    assert "mlp (100% too low)" in labels


def test_unknown_figure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such figure: fig4"):
        figures.draw(figures.Sources(), tmp_path, ["fig4"])
