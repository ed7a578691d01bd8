"""What all runners share: their options, the order of things, the lines that they print.

Each prints one JSON object a line. The first is the cold start: `{"workload": "cold",
"first_token_s": …, "peak_rss_mib": …}`, from the start of the process to the first token of a
prompt of 128 tokens. Then the process rests for some seconds, for a start may put off what is
done when there is time, and workloads tell how it runs afterwards. Then comes one a workload and
repetition, with the figures of `workloads.summary` and the peak memory while it ran, or
`{"workload": …, "skipped": why}`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.workloads import (
    HIGHEST_ID,
    WARM_UP,
    WORKLOADS,
    Request,
    Workload,
    seed_of,
    summary,
)

Times = list[list[float]]
SETTLE_S = 5.0


class Unsupported(Exception):  # noqa: N818
    """This runner cannot run such a workload; the message says why."""


class Runner(Protocol):
    """A loaded model."""

    def run(self, requests: Sequence[Request]) -> Times:
        """Run requests that arrive at once; for each, the seconds until each of its tokens.

        Raises:
            Unsupported: it has no way to run these.
        """
        ...


class Stopwatch:
    """Notes when tokens come."""

    def __init__(self, num_requests: int) -> None:
        self.times: Times = [[] for _ in range(num_requests)]
        self._start_s = time.perf_counter()

    def note(self, request: int, num_tokens: int = 1) -> None:
        """Tokens of a request have come now."""
        now_s = time.perf_counter() - self._start_s
        self.times[request] += [now_s] * num_tokens


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every runner."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("model")
    made.add_argument("--workloads", default="W1,W2", help="names with commas between")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--repeat", type=int, default=1)
    made.add_argument(
        "--settle-s",
        type=float,
        default=SETTLE_S,
        help=f"seconds between start and workloads, for what a start puts off ({SETTLE_S:g})",
    )
    made.add_argument("--highest-id", type=int, default=HIGHEST_ID, help="of random token ids")
    made.add_argument(
        "--context-tokens",
        type=int,
        help="of the model: workloads with a longer sequence are skipped (by its config.json)",
    )
    return made


def asked(arguments: argparse.Namespace) -> dict[str, Workload]:
    """The workloads that were asked for."""
    names = arguments.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        sys.exit(f"no such workloads: {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    return {name: WORKLOADS[name] for name in names}


def chosen(arguments: argparse.Namespace) -> dict[str, Workload]:
    """Those of them that fit the model's context."""
    context = context_tokens(arguments)
    return {
        name: workload
        for name, workload in asked(arguments).items()
        if context is None or workload.longest <= context
    }


def context_tokens(arguments: argparse.Namespace) -> int | None:
    """Tokens of the longest sequence that the model is for; None where that is not known."""
    if arguments.context_tokens is not None:
        given: int = arguments.context_tokens
        return given
    return trained_tokens(Path(arguments.model))


def trained_tokens(folder: Path) -> int | None:
    """Tokens that a checkpoint, or what was made of it, is for, by its config.json if any."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    found = json.loads(path.read_text()).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def cache_tokens(arguments: argparse.Namespace, block_size: int) -> int:
    """Tokens of KV cache that hold any one of the workloads at once, in whole blocks."""
    runs = [
        workload.requests(seed_of(name, repetition))
        for name, workload in {"warm-up": WARM_UP, **chosen(arguments)}.items()
        for repetition in range(arguments.repeat)
    ]
    blocks = (sum(-(-one.total_tokens // block_size) + 1 for one in run) for run in runs)
    return block_size * max(blocks)


def longest(arguments: argparse.Namespace) -> int:
    """Tokens of the longest sequence that may come."""
    return max(one.longest for one in (WARM_UP, *chosen(arguments).values()))


def main(arguments: argparse.Namespace, load: Callable[[], Runner]) -> None:
    """Load the model and run what was asked for."""
    workloads = chosen(arguments)
    runner = load()
    warm_up = WARM_UP.requests(seed_of("warm-up", 0), arguments.highest_id)
    age_s = process_age_s()
    first_s = runner.run(warm_up)[0][0]
    cold = {"first_token_s": age_s + first_s, "peak_rss_mib": peak_rss_mib()}
    tell("cold", cold)
    for name in asked(arguments):
        if name not in workloads:
            tell(name, {"skipped": f"the model's context is {context_tokens(arguments)} tokens"})
    time.sleep(arguments.settle_s)
    for repetition in range(arguments.repeat):
        for name, workload in workloads.items():
            requests = workload.requests(seed_of(name, repetition), arguments.highest_id)
            reset_peak()
            try:
                figures = summary(requests, runner.run(requests))
            except Unsupported as why:
                tell(name, {"skipped": str(why)})
                continue
            tell(name, figures | {"peak_rss_mib": peak_rss_mib()})


def tell(workload: str, figures: dict[str, float] | dict[str, str]) -> None:
    """Print one line."""
    print(json.dumps({"workload": workload, **figures}), flush=True)


def process_age_s() -> float:
    """Seconds since this process was started (Linux)."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


def reset_peak() -> None:
    """Let the peak memory begin at what is resident now, where Linux allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # then it stays the peak of the whole process
        return


def peak_rss_mib() -> float:
    """Most resident memory since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
