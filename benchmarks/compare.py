"""Run two runners alternately, A B A B, and print medians and the ratio A / B.

    python -m benchmarks.compare --rounds 3 \
        --a "python -m benchmarks.run_onnxport ARTIFACT --workloads W1,W2" \
        --b "PEER_PYTHON -m benchmarks.peers.openvino_genai MODEL_IR --workloads W1,W2"

Each round starts both afresh, so that a change of the machine's mood hits both. For all peers and
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

Figures = dict[tuple[str, str], list[float]]  # (workload, figure) -> one value a run


def collect(command: str, into: Figures) -> None:
    """Run `command` and add the figures that it prints as JSON lines."""
    done = subprocess.run(shlex.split(command), check=True, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            values = json.loads(line)
            workload = values.pop("workload")
            if "skipped" in values:
                print(f"{workload} is skipped: {values['skipped']}", file=sys.stderr)
                continue
            for figure, value in values.items():
                into[workload, figure].append(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--a", required=True)
    parser.add_argument("--b", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    a: Figures = defaultdict(list)
    b: Figures = defaultdict(list)
    for _ in range(arguments.rounds):
        collect(arguments.a, a)
        collect(arguments.b, b)
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
