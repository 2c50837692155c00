"""`python -m rtvirtio`: campaigns, cases, training and figures."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from rtvirtio import __version__, grid

if TYPE_CHECKING:
    from rtvirtio.campaign import Summary

DONE, FAILED, USAGE, INCOMPLETE, INTERRUPTED = 0, 1, 2, 3, 130


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m rtvirtio",
        description="rtvirtio offline: simulate grids of conditions, train models on them, draw the figures.",
        epilog="Exit codes: 0 done, 1 error, 2 usage, 3 incomplete (named what), 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"rtvirtio {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    campaign = verbs.add_parser(
        "campaign",
        help="simulate a grid of conditions",
        formatter_class=raw,
        description="Simulates every condition of a grid once and writes Parquet parts to OUT.",
        epilog=dedent("""\
            Grids:
              table2   the paper's Table II, 28,000 conditions: 1 to 4 VMs of 1 to 3 tasks of 100, 500
                       or 1500 IOPS, weights 50 to 700, slice_idle 1 to 8 ms and timeout_sync 32 to
                       124 ms on the host and in the guests
              wide     18,000: schedulers, slice_idle 0, low_latency, max_budget, neighbours, caps
              host     24,000: the same without schedulers in guests, which is what the planner asks
              figures  what Figs. 2 and 5 show, 30 seeds of each
            Its length is estimated and printed before it starts. Run again with the same options it
            goes on where it was: killed, interrupted (Ctrl-C) or with parts that were damaged since.

            Without --scheduler the conditions run on this machine's cores. With it they run on any
            Dask cluster whose workers have the same wheel: docs/python.md, Several machines.

            Examples:
              python -m rtvirtio campaign table2 --out table2
              python -m rtvirtio campaign wide --size 1000 --out wide
              python -m rtvirtio campaign table2 --out table2 --scheduler tcp://10.0.0.1:8786"""),
    )
    defaults = grid.Settings("table2")
    campaign.add_argument("grid", choices=["table2", "wide", "host", "figures"])
    campaign.add_argument("--out", type=Path, required=True, help="directory of the campaign")
    campaign.add_argument("--size", type=int, default=0, help="conditions, roughly (the grid's own)")
    campaign.add_argument("--device", default=defaults.device, help="simulated disk (%(default)s)")
    campaign.add_argument(
        "--window", type=float, default=defaults.window, metavar="S",
        help="simulated seconds at least (%(default)s)",
    )  # fmt: skip
    campaign.add_argument(
        "--percentile", type=float, default=defaults.percentile, metavar="P",
        help="go on until 10 samples of each task lie beyond it (%(default)s; 99.9 takes 100 s "
        "of a task of 100 IOPS)",
    )  # fmt: skip
    campaign.add_argument(
        "--longest", type=float, default=defaults.longest, metavar="N",
        help="but no longer than N windows (%(default)s)",
    )  # fmt: skip
    campaign.add_argument("--seed", type=int, default=defaults.seed, help="(%(default)s)")
    _add_cluster(campaign)

    cases = verbs.add_parser(
        "cases",
        help="simulate the 24 cases under each scheme (Fig. 8)",
        formatter_class=raw,
        description=(
            "Simulates the 24 cases under the paper's baselines, the planner by three models and the data\n"
            "plane, 20 runs of 5 minutes each. Writes the runs, table.txt and cases.json to OUT."
        ),
        epilog=dedent("""\
            A run passes if each task's judged percentile is within its target and 0.95 of its rate was
            delivered. A plan's refusal is a miss. Killed or interrupted, it goes on where it was.

            Example:
              python -m rtvirtio cases --profile profile.json --model trained/mlp.onnx --out cases"""),
    )
    cases.add_argument("--profile", type=Path, required=True, help="the device's, of `rtvirtio calibrate`")
    cases.add_argument(
        "--model", type=Path, help="ONNX file of `train`: the scheme mlp; without, it is left out"
    )
    cases.add_argument("--out", type=Path, required=True, help="directory of the runs")
    cases.add_argument("--device", default=defaults.device, help="simulated disk (%(default)s)")
    cases.add_argument("--tier", default="paper", choices=["paper", "strict"], help="targets (%(default)s)")
    cases.add_argument(
        "--neighbour", default="none", choices=["none", "writer"], help="beside the VMs (%(default)s)"
    )
    cases.add_argument("--repetitions", type=int, default=20, metavar="N", help="(%(default)s)")
    cases.add_argument(
        "--window", type=float, default=300.0, metavar="S", help="simulated seconds of a run (%(default)s)"
    )
    cases.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    _add_cluster(cases)

    train = verbs.add_parser(
        "train",
        help="train models on a campaign",
        formatter_class=raw,
        description=(
            "Trains the paper's network, the same with a preference for overestimates, and gradient\n"
            "boosting of quantiles; refits the paper's analytical model; puts a conformal bound on top.\n"
            "Writes training.json, predictions.parquet and, with --profile, ONNX files to OUT."
        ),
        epilog=dedent("""\
            Errors are of conditions that no model has seen. The ONNX files are for
            `rtvirtio plan --model FILE`; they name the profile's device and are refused for another.

            Example:
              python -m rtvirtio train table2 --out trained --profile profile.json --shown figures"""),
    )
    train.add_argument("campaign", type=Path, nargs="+", help="directories of campaigns")
    train.add_argument(
        "--judge",
        action="store_true",
        help="only hold the network and boosting against --cells: real.json, real.parquet",
    )
    train.add_argument("--out", type=Path, required=True, help="directory of the results")
    train.add_argument("--profile", type=Path, help="the device's, of `rtvirtio calibrate`")
    train.add_argument("--shown", type=Path, help="a campaign `figures`: predict it too, for Fig. 5")
    train.add_argument(
        "--cells",
        type=Path,
        nargs="+",
        help="cells.jsonl of `rtvirtio-lab bench`: real conditions as judges, and for the bounds",
    )
    train.add_argument("--sizes", action="store_true", help="study of sizes, for Fig. 3")
    train.add_argument("--seed", type=int, default=1, help="(%(default)s)")

    figures = verbs.add_parser(
        "figures",
        help="draw the paper's figures from our data",
        formatter_class=raw,
        description="Draws Figs. 2, 3, 5a-c, 6, 7, 8 and Table III as SVG and PNG to OUT.",
        epilog=dedent("""\
            A figure whose data is not given is not drawn and is named; the exit code is then 3.

            Example:
              python -m rtvirtio figures --campaign figures --trained trained \\
                  --cells docs/results/strict/cells.jsonl --out figures-drawn"""),
    )
    figures.add_argument("--campaign", type=Path, help="a campaign `figures`: Figs. 2 and 5")
    figures.add_argument("--trained", type=Path, help="what `train` wrote: Figs. 3, 5, 6, Table III")
    figures.add_argument("--cases", type=Path, help="what `cases` wrote: Fig. 8")
    figures.add_argument("--cells", type=Path, help="cells.jsonl of `rtvirtio-lab bench`: Figs. 7 and 8")
    figures.add_argument("--only", nargs="+", metavar="NAME", help="fig2, fig5a, table3, ...")
    figures.add_argument("--out", type=Path, required=True, help="directory of the figures")
    return parser


def _add_cluster(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--workers", type=int, help="processes of the local cluster (one a core)")
    verb.add_argument("--scheduler", metavar="ADDRESS", help="a Dask scheduler, tcp://HOST:PORT")


def _ended(summary: "Summary") -> int:
    if summary.interrupted:
        print("interrupted; run it again to go on", file=sys.stderr)
        return INTERRUPTED
    return DONE if summary.complete else INCOMPLETE


def _campaign(args: argparse.Namespace) -> int:
    from rtvirtio import campaign

    names = ("grid", "size", "device", "window", "percentile", "longest", "seed")
    settings = grid.Settings(**{name: getattr(args, name) for name in names})
    return _ended(campaign.run(settings, args.out, scheduler=args.scheduler, workers=args.workers))


def _cases(args: argparse.Namespace) -> int:
    from rtvirtio import cases

    settings = grid.Settings("cases", device=args.device, window=args.window, longest=1.0, seed=args.seed)
    made = cases.runs(
        settings,
        json.loads(args.profile.read_text()),
        None if args.model is None else args.model.read_bytes(),
        tier=args.tier,
        neighbour=args.neighbour,
        repetitions=args.repetitions,
    )
    summary = cases.run(args.out, settings, list(made), scheduler=args.scheduler, workers=args.workers)
    if summary.complete:
        print((args.out / "table.txt").read_text(), end="")
    return _ended(summary)


def _train(args: argparse.Namespace) -> int:
    import pyarrow as pa

    from rtvirtio import cases, evaluate, parts, train

    profile = None if args.profile is None else json.loads(args.profile.read_text())
    table = pa.concat_tables([parts.load(directory) for directory in args.campaign])
    cells = None if args.cells is None else [c for path in args.cells for c in cases.read_cells(path)]
    if args.judge:
        if profile is None or cells is None:
            raise ValueError("--judge needs --profile and --cells")
        _print_real(evaluate.judge(table, cells, args.out, profile=profile, seed=args.seed)["real"])
        return DONE
    result = train.train(
        table,
        args.out,
        profile=profile,
        shown=None if args.shown is None else parts.load(args.shown),
        cells=cells,
        sizes=args.sizes,
        seed=args.seed,
    )
    print("\nSimulated conditions that no model has seen:")
    _print_errors(result["errors"], result["bounds"])
    if result["real"] is not None:
        _print_real(result["real"])
    print(f"\nwritten to {args.out}")
    return DONE


def _print_errors(errors: dict[str, dict[str, float]], bounds: dict[str, dict[str, float]]) -> None:
    print(
        f"{'':12} {'rows':>7} {'median factor':>14} {'p90':>6} {'MAE, ms':>9} {'too low':>8}"
        f"{'bound held':>12} {'bound / measured, median':>26}"
    )
    for name, e in errors.items():
        if e["rows"]:
            line = (
                f"{name:12} {e['rows']:>7} {e['median_factor']:>14.2f} {e['p90_factor']:>6.2f} "
                f"{e['mae_ms']:>9.2f} {e['underestimated']:>8.1%}"
            )
            if (b := bounds.get(name)) is not None:
                line += f"{b['held']:>12.1%} {b['median_bound_over_measured']:>26.2f}"
            print(line)


def _print_real(real: dict[str, Any]) -> None:
    print("\nReal conditions that no model has seen, where bfq idles:")
    _print_errors(real["errors_idling"], {})
    print("\nAll real conditions that no model has seen:")
    _print_errors(real["errors"], real["bounds"])
    _print_bound("mlp's bound", real["bounds"]["mlp"])
    _print_bound("where bfq idles", real["bounds_idling"]["mlp"])
    _print_bound("where it does not", real["bounds_not_idling"]["mlp"])
    _print_bound("as a plan has it", real["bounds_planned"]["mlp"])
    if real["repeated"]["pairs"]:
        _print_bound("another real run x a factor", real["repeated"]["bound"])
    _print_bound("the simulator itself, many runs x a factor", real["asked"])


def _print_bound(name: str, bound: dict[str, Any]) -> None:
    low, high = bound["held_interval"]
    print(
        f"{name}: {bound['rows']} rows, held {bound['held']:.1%} ({low:.1%} to {high:.1%}), median "
        f"{bound['median_bound_over_measured']:.2f} times the measured tail"
    )


def _figures(args: argparse.Namespace) -> int:
    from rtvirtio import figures

    sources = figures.read_sources(args.campaign, args.trained, args.cells, args.cases)
    lacking = figures.draw(sources, args.out, args.only or figures.NAMES)
    return INCOMPLETE if lacking else DONE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb; gives back the exit code."""
    args = _parser().parse_args(arguments)
    verb = {"campaign": _campaign, "cases": _cases, "train": _train, "figures": _figures}[args.verb]
    try:
        return verb(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, ImportError):
            print("hint: pip install 'rtvirtio[all]'", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
