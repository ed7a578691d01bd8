"""Simulate the engine under load.

    python -m benchmarks.simulate [--requests 100000] [--scenario NAME ...]
                                  [--plots docs/plots] [--json FILE]

Without `--scenario` every scenario is run; `--plots` also runs the sweeps behind the plots, each
point with a fortieth of the requests.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.simulate import plots, studies
from benchmarks.simulate.driver import simulate
from benchmarks.simulate.figures import Figures, Percentiles
from benchmarks.simulate.scenarios import SCENARIOS

COLUMNS = (
    "scenario",
    "TTFT p50 / p90 / p99, s",
    "between tokens p50 / p90 / p99, s",
    "queue p50 / p99, s",
    "output tok/s",
    "hits",
    "preempted",
    "refused (gave up)",
    "Jain",
    "steps",
    "virtual h",
    "real s",
)
SWEEP_SHARE = 40


def cells(name: str, run: Figures) -> list[str]:
    """One line of the table."""

    def three(times: Percentiles) -> str:
        return f"{times.p50:.2f} / {times.p90:.2f} / {times.p99:.2f}"

    return [
        name,
        three(run.ttft_s),
        three(run.inter_token_s),
        f"{run.queue_s.p50:.2f} / {run.queue_s.p99:.2f}",
        f"{run.output_tokens_per_s:.0f}",
        f"{100 * run.hit_rate:.0f} %",
        str(run.preemptions),
        f"{run.refused} ({run.gave_up})",
        f"{run.jain:.3f}",
        str(run.steps),
        f"{run.virtual_s / 3600:.1f}",
        f"{run.real_s:.0f}",
    ]


def row(values: list[str]) -> str:
    """A line of Markdown."""
    return f"| {' | '.join(values)} |"


def tenants(name: str, run: Figures) -> list[str]:
    """Lines about the tenants of a run."""
    return [
        row([
            name, tenant, str(one.finished), f"{one.refused} ({one.gave_up})",
            f"{one.ttft_s.p50:.2f} / {one.ttft_s.p99:.2f}", str(one.asked_tokens),
            str(one.served_tokens),
        ])
        for tenant, one in run.tenants.items()
    ]  # fmt: skip


def draw(folder: Path, size: int, seed: int) -> dict[str, Any]:
    """Run the sweeps and write their plots; returns what they show."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = {
        "load": studies.load(size, seed),
        "cache": studies.cache(size, seed),
        "fairness": studies.fairness(size, seed),
        "bounds": studies.bounds(),
    }
    for name, study in shown.items():
        print(plots.draw(name, study, folder))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--scenario", nargs="*", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plots", type=Path, help="folder for SVG files")
    parser.add_argument("--json", type=Path, help="file for every figure")
    options = parser.parse_args()
    start, runs = time.perf_counter(), {}
    print(row(list(COLUMNS)), row(["---"] * len(COLUMNS)), sep="\n")
    for name in options.scenario:
        runs[name] = simulate(SCENARIOS[name], options.requests, options.seed)
        print(row(cells(name, runs[name])), flush=True)
    print("\n| scenario | tenant | served | refused (gave up) | TTFT p50 / p99, s "
          "| tokens asked | tokens served |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for name, run in runs.items():
        if len(run.tenants) > 1:
            print("\n".join(tenants(name, run)))
    shown = {}
    if options.plots:
        shown = draw(options.plots, max(1, options.requests // SWEEP_SHARE), options.seed)
    if options.json:
        found = {"scenarios": {name: asdict(run) for name, run in runs.items()}, "studies": shown}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
