"""The paper's figures from our data, as SVG and PNG: Figs. 2, 3, 5a-c, 6, 7, 8 and Table III.

Figs. 2 and 5 need a campaign of the grid `figures`, Figs. 3, 5's curves, 6 and Table III what training
wrote, Fig. 8 what `cases` came to, Figs. 7 and 8 the cells of `rtvirtio-lab bench`. Nothing is made up: a
figure whose data is not there is not drawn, and is named with what it lacks.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rtvirtio import cases, grid

NAMES = ("fig2", "fig3", "fig5a", "fig5b", "fig5c", "fig6", "fig7", "fig8", "table3")
MODELS = ("paper", "mlp", "mlp-over", "boosting")
MODEL_COLOURS = {"paper": "C0", "mlp": "C2", "mlp-over": "C8", "boosting": "C3"}
#: Fig. 7's case: three VMs with light and medium tasks.
EXAMPLE = "3xL+M"
EXAMPLE_SCHEMES = ("bfq", "ionice", "rt-xen", "rtvirtio")
#: Of schemes, simulated and measured.
SCHEME_COLOURS = {
    "bfq": "C0", "ionice": "C1", "rt-xen": "C4", "analytical": "C3", "mlp": "C6", "structural": "C2",
    "rtvirtio": "C2", "data-plane": "C9", "hand": "C8", "none": "0.75", "mq-deadline": "0.55", "kyber": "C5",
}  # fmt: skip


class MissingError(Exception):
    """What a figure lacks."""


@dataclass
class Sources:
    """Where data comes from; what is None is not there."""

    #: Rows of a campaign of the grid `figures`, and its settings.
    shown: pa.Table | None = None
    shown_settings: grid.Settings | None = None
    #: A directory that `train` wrote.
    training: Path | None = None
    #: Cells of `rtvirtio-lab bench`.
    cells: list[dict[str, Any]] = field(default_factory=list)
    #: What `cases` came to.
    verdicts: list[cases.Verdict] = field(default_factory=list)

    def tails(self, figure: str) -> dict[str, list[dict[str, Any]]]:
        """Rows of each place of a figure, in the figure's order."""
        if self.shown is None or self.shown_settings is None:
            raise MissingError("a campaign of the grid `figures`")
        by_id: dict[str, list[dict[str, Any]]] = {}
        columns = ["id", "vm", "task", "mean_ns", "p50_ns", "p99_ns", "percentile", "value_ns"]
        for row in self.shown.select(columns).to_pylist():
            by_id.setdefault(row["id"], []).append(row)
        places: dict[str, list[dict[str, Any]]] = {}
        for of_figure, place, condition in grid.shown(self.shown_settings):
            if of_figure == figure:
                found = by_id.get(grid.condition_id(condition))
                if found is None:
                    raise MissingError(f"the campaign's condition {grid.condition_id(condition)}")
                places.setdefault(place, []).extend(found)
        return places

    def trained(self) -> dict[str, Any]:
        """training.json."""
        if self.training is None or not (self.training / "training.json").exists():
            raise MissingError("training.json of `train`")
        loaded: dict[str, Any] = json.loads((self.training / "training.json").read_text())
        return loaded

    def predictions(self, name: str, what: str) -> pa.Table:
        """A Parquet file of training."""
        if self.training is None or not (self.training / name).exists():
            raise MissingError(what)
        return pq.read_table(self.training / name)


def _figure(width: float = 6.0, height: float = 3.6, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)
    return figure, list(axes[0])


def _judged_ms(found: Iterable[dict[str, Any]]) -> list[float]:
    return [row["value_ns"] / 1e6 for row in found if row["value_ns"] is not None]


def _percentiles(found: Iterable[dict[str, Any]]) -> str:
    seen = sorted({row["percentile"] for row in found if row["percentile"] is not None})
    return " and ".join(f"p{p:g}" for p in seen)


def fig2(sources: Sources) -> Figure:
    """Mean and tail of 1 to 3 readers, in one VM and in four."""
    places = sources.tails("fig2")
    figure, (left, right) = _figure(8.0, columns=2)
    every = [row for found in places.values() for row in found]
    for axes, title, values in (
        (left, "Mean", lambda found: [row["mean_ns"] / 1e6 for row in found]),
        (right, f"Tail ({_percentiles(every)})", _judged_ms),
    ):
        for offset, (vms, label) in enumerate((("1", "1 VM"), ("4", "4 VMs"))):
            found = [values(places[f"{vms}/{tasks}"]) for tasks in grid.TASKS]
            means = [float(np.mean(ms)) if ms else np.nan for ms in found]
            at = np.arange(len(means)) + (offset - 0.5) * 0.38
            bars = axes.bar(at, means, 0.36, label=label)
            axes.bar_label(bars, fmt="%.3g", fontsize=8)
        axes.set_xticks(range(len(grid.TASKS)), [f"{tasks}" for tasks in grid.TASKS])
        axes.set(title=title, xlabel="tasks of each VM (1500 random reads/s)", ylabel="ms", yscale="log")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def fig3(sources: Sources) -> Figure:
    """MSE against a network's size."""
    sizes = sources.trained()["sizes"]
    if not sizes:
        raise MissingError("a size study (`train --sizes`)")
    figure, (axes,) = _figure()
    for layers in sorted({size["layers"] for size in sizes}):
        of = [size for size in sizes if size["layers"] == layers]
        label = f"{layers} hidden layer{'s' if layers > 1 else ''}"
        neurons = [size["neurons"] for size in of]
        axes.plot(neurons, [s["validation"] for s in of], marker=".", label=label)
    axes.set(xlabel="neurons of each layer", ylabel="MSE of log10(tail), unseen conditions", yscale="log")
    axes.legend()
    return figure


def _fig5(sources: Sources, figure_name: str, xlabel: str, label: Callable[[str], str]) -> Figure:
    places = sources.tails(figure_name)
    every = [row for found in places.values() for row in found]
    figure, (axes,) = _figure(8.0, 4.0)
    # Fig. 5b varies the weight of the first VM.
    first = figure_name == "fig5b"
    measured = [_judged_ms(row for row in found if not first or row["vm"] == 0) for found in places.values()]
    at = np.arange(len(places))
    axes.boxplot(measured, positions=at, widths=0.5, showfliers=False)
    # Nothing is drawn where no task had ten samples beyond its p99.
    means = [float(np.mean(m)) if m else np.nan for m in measured]
    deviations = [float(np.std(m)) if m else np.nan for m in measured]
    axes.bar(at, deviations, 0.7, color="0.85", zorder=0, label="standard deviation")
    axes.plot(at, means, "k_", markersize=12, label="simulated, mean")
    try:
        predictions = sources.predictions("shown.parquet", "").to_pylist()
    except MissingError:
        predictions = []
    by_id: dict[str, list[dict[str, Any]]] = {}
    for row in predictions:
        if not first or row["vm"] == 0:
            by_id.setdefault(row["id"], []).append(row)
    for model in MODELS:
        line = []
        for found in places.values():
            of = [row[f"{model}_ms"] for id in {r["id"] for r in found} for row in by_id.get(id, [])]
            line.append(float(np.mean(of)) if of else np.nan)
        if np.isfinite(line).any():
            axes.plot(at, line, marker="o", markersize=3, color=MODEL_COLOURS[model], label=model)
    title = f"Tail ({_percentiles(every)}), {len(places)} × {grid.REPETITIONS} simulations"
    if not predictions:
        title += "; no predictions (`train --shown`)"
    axes.set_xticks(at, [label(place) for place in places], fontsize=8)
    axes.set(title=title, xlabel=xlabel, ylabel="ms", ylim=(0, None))
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def fig5a(sources: Sources) -> Figure:
    """Four VMs with one heavy task under the host's bfq parameters."""
    xlabel = "slice_idle / timeout_sync, ms"
    return _fig5(sources, "fig5a", xlabel, lambda place: place.replace("/", "\n"))


def fig5b(sources: Sources) -> Figure:
    """Four VMs with one heavy task; the first VM's weight."""
    return _fig5(sources, "fig5b", "weight of the VM (the others: 100)", str)


def fig5c(sources: Sources) -> Figure:
    """Four VMs with three light, medium or heavy tasks."""
    names = {"100": "light", "500": "medium", "1500": "heavy"}
    return _fig5(sources, "fig5c", "three tasks of each VM", lambda place: names[place])


def fig6(sources: Sources) -> Figure:
    """Distribution of prediction errors."""
    tables = [(sources.predictions("predictions.parquet", "predictions.parquet of `train`"), "simulated")]
    with contextlib.suppress(MissingError):
        tables.append((sources.predictions("real.parquet", ""), "measured"))
    figure, panels = _figure(6.0 * len(tables), columns=len(tables))
    for axes, (table, what) in zip(panels, tables, strict=True):
        _errors(axes, table, what)
    return figure


def _errors(axes: Axes, table: pa.Table, what: str) -> None:
    measured = table["measured_ms"].to_numpy()
    drawn = {model: measured - table[f"{model}_ms"].to_numpy() for model in MODELS}
    drawn = {model: error[np.isfinite(error)] for model, error in drawn.items()}
    # The paper's model may be off by much more than the others; 98 % of these set the range.
    learned = np.concatenate([error for model, error in drawn.items() if model != "paper"])
    low, high = np.quantile(learned, [0.01, 0.99])
    bins = np.linspace(min(low, -1.0), max(high, 1.0), 61)
    for model, error in drawn.items():
        if not len(error):
            continue
        outside = float(np.mean((error < bins[0]) | (error > bins[-1])))
        label = f"{model} ({np.mean(error > 0):.0%} too low"
        label += f", {outside:.0%} beyond the axis)" if outside > 0.005 else ")"
        weights = np.full(len(error), 1 / len(error))
        axes.hist(
            error, bins.tolist(), weights=weights, histtype="step", color=MODEL_COLOURS[model], label=label
        )
    axes.axvline(0, color="0.6", linewidth=0.8, zorder=0)
    xlabel = f"{what} − predicted, ms (negative: overestimate)"
    axes.set(xlabel=xlabel, ylabel="fraction of rows", title=f"{len(measured):,} {what} rows")
    axes.legend(fontsize=8)


def fig7(sources: Sources) -> Figure:
    """Who met their targets in one case, by scheme."""
    cells = [cell for cell in sources.cells if cell["key"]["case"] == EXAMPLE]
    by_scheme: dict[str, dict[str, Any]] = {}
    for cell in sorted(cells, key=lambda cell: cell["key"]["repetition"]):
        if cell["discarded"] is None:
            by_scheme.setdefault(cell["key"]["scheme"], cell)
    schemes = [scheme for scheme in EXAMPLE_SCHEMES if scheme in by_scheme]
    if not schemes:
        raise MissingError(f"cells of {EXAMPLE} (`rtvirtio-lab bench`)")
    figure, columns = _figure(3.0 * len(schemes), 3.6, len(schemes))
    figure.supxlabel("judged percentile, ms (dashed: target)", fontsize=9)
    for axes in columns[1:]:
        axes.sharex(columns[0])
    for axes, scheme in zip(columns, schemes, strict=True):
        tasks = by_scheme[scheme]["tasks"]
        names = []
        for at, task in enumerate(tasks):
            target = task["target"] / 1e6
            judged = task["judged"]
            delivered = task["delivered_iops"] / task["requested_iops"]
            axes.plot([target] * 2, [at - 0.4, at + 0.4], "k--", linewidth=1)
            text = "too few samples" if judged is None else f"{judged['value'] / 1e6:.1f} ms"
            if judged is not None:
                colour = "C2" if task["passed"] else "C3"
                axes.barh(at, judged["value"] / 1e6, 0.6, color=colour)
            if delivered < 0.95:
                text += f", {delivered:.0%} delivered"
            names.append(f"{task['vm']} {task['task']}\n{text}")
        axes.set_yticks(range(len(tasks)), names, fontsize=7)
        verdict = "passes" if by_scheme[scheme]["passed"] else "fails"
        axes.set(title=f"{scheme}: {verdict}", xscale="log")
    return figure


def _measured(cells: list[dict[str, Any]]) -> list[cases.Verdict]:
    """Real cells as verdicts, the schemes in their order."""
    runs: dict[tuple[str, str], list[bool]] = {}
    for cell in cells:
        if cell["discarded"] is None:
            key = cell["key"]
            runs.setdefault((key["case"], key["scheme"]), []).append(cell["passed"])
    return [
        cases.Verdict(case, scheme, len(passed), sum(passed), sum(passed))
        for (case, scheme), passed in sorted(runs.items(), key=lambda run: (run[0][0], _place(run[0][1])))
    ]


def _place(scheme: str) -> tuple[int, str]:
    order = ("bfq", "ionice", "rt-xen", "none", "mq-deadline", "kyber", "hand", "rtvirtio")
    return (order.index(scheme) if scheme in order else len(order), scheme)


def _pass_rates(axes: Axes, verdicts: list[cases.Verdict], what: str, with_paper: bool) -> None:
    names = list(dict.fromkeys(v.case for v in verdicts))
    schemes = list(dict.fromkeys(v.scheme for v in verdicts))
    by_place = {(v.case, v.scheme): v for v in verdicts}
    width = 0.84 / len(schemes)
    means = cases.averages(verdicts)
    # After the cases: the averages, and the paper's as lines across them.
    for offset, scheme in enumerate(schemes):
        found = [by_place.get((case, scheme)) for case in names]
        rates = [np.nan if v is None else 100 * v.passed / v.runs for v in found]
        mean, low, high = means[scheme]
        at = np.arange(len(names) + 1) + (offset - (len(schemes) - 1) / 2) * width
        colour = SCHEME_COLOURS.get(scheme, f"C{offset}")
        axes.bar(at, [*rates, mean], width, label=scheme, color=colour)
        axes.errorbar(at[-1], mean, [[mean - low], [high - mean]], color="k", linewidth=0.8)
        # A bar of nothing is a result too.
        zero = [x for x, rate in zip(at, [*rates, mean], strict=True) if rate == 0]
        axes.plot(zero, [0] * len(zero), "|", color=colour, markersize=8)
        if with_paper and scheme in cases.PAPER:
            paper = cases.PAPER[scheme]
            axes.plot([at[-1] - width / 2, at[-1] + width / 2], [paper] * 2, color="k", linewidth=2)
    axes.axvline(len(names) - 0.5, color="0.6", linewidth=0.8)
    axes.set_xticks(range(len(names) + 1), [*names, "average"], fontsize=8)
    counts = sorted({v.runs for v in verdicts})
    of = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    axes.set(ylabel="runs passed, %", title=f"{what}: {of} runs of each case and scheme", ylim=(0, 105))
    axes.set_xlim(-0.6, len(names) + 0.6)
    axes.legend(fontsize=7, ncols=len(schemes), loc="upper center", bbox_to_anchor=(0.5, -0.1))


def fig8(sources: Sources) -> Figure:
    """Pass rates by case and scheme; black lines at the averages are the paper's."""
    measured = _measured(sources.cells)
    keys = [cell["key"] for cell in sources.cells]
    said = ", ".join(
        sorted({f"{key['tier']} targets" for key in keys} | {f"neighbour {key['neighbour']}" for key in keys})
    )
    panels = [
        (v, what) for v, what in ((sources.verdicts, "simulated"), (measured, f"measured, {said}")) if v
    ]
    if not panels:
        raise MissingError("run of `cases`, nor a cell (`rtvirtio-lab bench`)")
    most = max(len({v.case for v in verdicts}) for verdicts, _ in panels)
    figure = Figure(figsize=(max(7.0, 0.75 * most), 3.8 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (verdicts, what) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _pass_rates(axes, verdicts, what, verdicts is sources.verdicts)
    return figure


def table3(sources: Sources) -> Figure:
    """The paper's λ beside those refit to our data."""
    paper = sources.trained()["paper"]
    names = {
        "weight": "λ of the weight",
        "timeout_sync": "λ of timeout_sync",
        "slice_idle": "λ of slice_idle",
    }
    cells = [
        [name, f"{paper['table_iii'][key]:.3g}", f"{paper['refit'][key]:.3g}"] for key, name in names.items()
    ]
    throughput = [paper[which]["throughput"] / 1e6 for which in ("table_iii", "refit")]
    cells.append(["T_agg, MB/s", *(f"{t:.0f}" for t in throughput)])
    figure, (axes,) = _figure(5.0, 1.8)
    axes.axis("off")
    header = ["host parameter", "paper, Table III", "refit"]
    axes.table(cells, colLabels=header, loc="center", cellLoc="right").scale(1, 1.3)
    return figure


def draw(
    sources: Sources,
    out: Path,
    names: Sequence[str] = NAMES,
    say: Callable[[str], object] = print,
) -> list[str]:
    """Draws those figures to ``out``; gives back the names of those that were not."""
    makers: dict[str, Callable[[Sources], Figure]] = {
        "fig2": fig2, "fig3": fig3, "fig5a": fig5a, "fig5b": fig5b, "fig5c": fig5c, "fig6": fig6,
        "fig7": fig7, "fig8": fig8, "table3": table3,
    }  # fmt: skip
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise ValueError(f"no such figure: {', '.join(unknown)} (there are {', '.join(NAMES)})")
    out.mkdir(parents=True, exist_ok=True)
    lacking = []
    # The same data gives the same bytes.
    with mpl.rc_context({"svg.hashsalt": "rtvirtio", "svg.fonttype": "none"}):
        for name in names:
            try:
                figure = makers[name](sources)
            except MissingError as missing:
                say(f"{name}: not drawn, for there is no {str(missing).removeprefix('a ')}")
                lacking.append(name)
                continue
            figure.savefig(out / f"{name}.svg", metadata={"Date": None})
            figure.savefig(out / f"{name}.png", dpi=150)
            say(f"{name}: {out / name}.svg and .png")
    return lacking


def read_sources(
    shown: Path | None = None,
    training: Path | None = None,
    cells: Path | None = None,
    evaluated: Path | None = None,
) -> Sources:
    """Sources from what is on disk."""
    from rtvirtio import parts

    settings = None
    if shown is not None:
        settings = grid.Settings(**json.loads((shown / "campaign.json").read_text())["settings"])
        if settings.grid != "figures":
            raise ValueError(f"{shown}: a campaign of the grid {settings.grid}, not figures")
    return Sources(
        None if shown is None else parts.load(shown),
        settings,
        training,
        [] if cells is None else cases.read_cells(cells),
        [] if evaluated is None else cases.read(evaluated),
    )
