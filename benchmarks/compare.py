"""Run two runners alternately, A B A B, and print medians and the ratio A / B.

    python -m benchmarks.compare --rounds 3 \
        --a "python -m benchmarks.run_onnxport ARTIFACT --workloads W1,W2" \
        --b "PEER_PYTHON -m benchmarks.peers.openvino_genai MODEL_IR --workloads W1,W2"

Each round starts both afresh, so that a change of the machine's mood hits both. With `--cold`
each is stopped after its first token, and starts are all that is compared. Before the first round
each is started once for nothing, for what a change of the code makes anew. For all peers and
workloads at once there is `benchmarks.run_all`; this is for two variants of one of them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict

from benchmarks.cold import COLD, StartError, start
from benchmarks.pairs import environment, why_ended

Figures = dict[tuple[str, str], list[float]]  # (workload, figure) -> one value a run


def collect(command: str, into: Figures, *, is_cold: bool = False) -> None:
    """Run `command` and add the figures that it prints as JSON lines, or those of its start."""
    if is_cold:
        for figure, value in first_figures(command).items():
            into[COLD, figure].append(value)
        return
    done = subprocess.run(
        shlex.split(command), check=False, capture_output=True, text=True, env=environment()
    )
    if done.returncode:
        sys.exit(f"{command} failed: {why_ended(done.returncode, done.stderr)}")
    for line in done.stdout.splitlines():
        if not line.startswith("{"):
            continue
        values = json.loads(line)
        workload = values.pop("workload")
        if "skipped" in values:
            print(f"{workload} is skipped: {values['skipped']}", file=sys.stderr)
            continue
        for figure, value in values.items():
            into[workload, figure].append(value)


def first_figures(command: str) -> dict[str, float]:
    """How a command's start went; what it would do then is not waited for."""
    try:
        return start(shlex.split(command))
    except (StartError, OSError) as error:
        sys.exit(f"{command} printed no figures: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--a", required=True)
    parser.add_argument("--b", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="compare cold starts alone")
    arguments = parser.parse_args()
    a: Figures = defaultdict(list)
    b: Figures = defaultdict(list)
    for command in (arguments.a, arguments.b):
        first_figures(command)
    for _ in range(arguments.rounds):
        collect(arguments.a, a, is_cold=arguments.cold)
        collect(arguments.b, b, is_cold=arguments.cold)
    print("| workload | figure | A median (low–high) | B median (low–high) | A / B |")
    print("|---|---|---|---|---|")
    for key in a:
        if key in b:
            left, right = statistics.median(a[key]), statistics.median(b[key])
            spread = [f"{min(v):.4g}–{max(v):.4g}" for v in (a[key], b[key])]
            print(
                f"| {key[0]} | {key[1]} | {left:.4g} ({spread[0]}) | {right:.4g} ({spread[1]}) "
                f"| {left / right:.2f} |"
            )


if __name__ == "__main__":
    main()
