"""What scripts/demo-series keeps of a run of the demo, and the table that it makes of all runs.

    demo_series.py add OUT LOAD RUN EXIT_CODE DEMO_DIRECTORY
    demo_series.py table OUT
"""

import json
import statistics
import sys
from pathlib import Path

SCHEMES = ["bfq", "none", "hand", "rtvirtio", "data-plane"]


def add(out, load, run, code, demo):
    """Adds one line to OUT/runs.jsonl."""
    verdict = json.loads((demo / "verdict.json").read_text())
    cells = [json.loads(line) for line in (demo / "cells.jsonl").read_text().splitlines()]
    plan = json.loads((demo / "plan.json").read_text())
    by_scheme = {cell["key"]["scheme"]: cell for cell in cells}
    # The hand setting is the same in each run, so its bounds tell how wide a calibration makes them.
    hand = [task["prediction"] for task in by_scheme["hand"]["tasks"] if task["prediction"]]
    line = {
        "load": load,
        "run": int(run),
        "exit_code": int(code),
        "verdict": verdict,
        "empty_rows": [s for s in SCHEMES if s not in by_scheme or not by_scheme[s]["tasks"]],
        "plan_bounds_ms": [t["bound"] and t["bound"] / 1e6 for t in plan["tasks"]],
        "hand_bounds_ms": [p["bound"] and p["bound"] / 1e6 for p in hand],
        "started": cells[0]["started"],
        "tasks": {
            scheme: [
                {
                    "task": f"{t['vm']}/{t['task']}",
                    "target_ms": t["target"] / 1e6,
                    "judged": t["judged"],
                    "delivered": t["delivered_iops"] / t["requested_iops"],
                    "passed": t["passed"],
                }
                for t in cell["tasks"]
            ]
            for scheme, cell in by_scheme.items()
        },
    }
    with (out / "runs.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def load_rows(runs, load):
    """The table of one load: a row for each scheme."""
    runs = [run for run in runs if run["load"] == load]
    if not runs:
        return []
    lines = [
        f"{load}: {len(runs)} runs",
        f"  {'scheme':<11} {'met':>9} {'~':>4} {'m':>4} {'?':>4} {'missed':>7} {'behind hand':>12}"
        f" {'background MB/s':>24} {'canary p99 ms':>20} {'CPUs':>5}",
    ]
    for scheme in SCHEMES:
        of = [s for run in runs for s in run["verdict"]["schemes"] if s["scheme"] == scheme]
        if not of:
            lines.append(f"  {scheme:<11} no row")
            continue

        def total(key, of=of):
            return sum(s[key] for s in of)

        def spread(key, of=of):
            values = [s[key] for s in of]
            middle = statistics.median(values)
            return f"{middle:.2f} ({min(values):.2f}–{max(values):.2f})"

        lines.append(
            f"  {scheme:<11} {total('met'):>4}/{total('tasks'):<4} {total('within_interval'):>4}"
            f" {total('machine_late'):>4} {total('not_judged'):>4} {total('missed'):>7}"
            f" {total('behind_hand'):>12} {spread('background_mb'):>24} {spread('canary_ms'):>20}"
            f" {statistics.median(s['busy_cores'] for s in of):>5.2f}"
        )
    verdicts = [run["verdict"] for run in runs]
    compared = sum(v["bounds"][0] for v in verdicts)
    held = sum(v["bounds"][1] for v in verdicts)
    bounded = sum(v["bounded"][0] for v in verdicts)
    tasks = sum(v["bounded"][1] for v in verdicts)
    hand = [b for run in runs for b in run["hand_bounds_ms"] if b is not None]
    calibration = [v["calibration_seconds"] for v in verdicts]
    whole = [v["seconds"] for v in verdicts]
    codes = [run["exit_code"] for run in runs]
    lines += [
        f"  exit codes {', '.join(f'{c} × {codes.count(c)}' for c in sorted(set(codes)))};"
        f" empty rows {sum(len(run['empty_rows']) for run in runs)};"
        f" plans that promise all targets {sum(v['promised'] for v in verdicts)}",
        f"  tasks with a bound {bounded}/{tasks}; bounds that held {held}/{compared};"
        f" median bound on the hand setting's tasks {statistics.median(hand):.2f} ms"
        if hand
        else "  no bounds",
        f"  calibration {statistics.median(calibration):.0f} s"
        f" ({min(calibration):.0f}–{max(calibration):.0f});"
        f" whole demo {statistics.median(whole):.0f} s ({min(whole):.0f}–{max(whole):.0f})",
        "",
    ]
    return lines


def table(out):
    """Writes OUT/table.txt."""
    runs = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    lines = [
        "Tasks over all runs: met; ~ missed within the 95 % interval; m missed by no more than the",
        "machine itself was late; ? too few requests to judge. Medians, and ranges in brackets.",
        "",
    ]
    for load in ["quiet", "half", "full"]:
        lines += load_rows(runs, load)
    (out / "table.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    if sys.argv[1] == "add":
        add(Path(sys.argv[2]), *sys.argv[3:6], Path(sys.argv[6]))
    else:
        table(Path(sys.argv[2]))
