"""Cold starts: processes that are ended when they have told how long their first token took.

A start reads what earlier ones left: bytecode, the files' pages in memory, our lowered graph, what
a peer compiled. So one start of each side comes first and does not count, and then they take turns.
Otherwise whoever comes first in a run would be the one that pays for a change of the code.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks import pairs
from benchmarks.pairs import Pair, Run

COLD = "cold"  # the group, and the workload that runners tell first
WORKLOAD = "W1"  # that a started process has its KV cache for
STARTS = 3  # that count, of each side


class StartError(Exception):
    """A process told no figures; the message says why."""


def start(
    command: Sequence[str], timeout_s: float | None = None, folder: Path | None = None
) -> dict[str, float]:
    """Start a runner, and end it when it has told its first token; returns what it told.

    Args:
        command: of a runner, workloads included.
        timeout_s: how long it may take; None: forever.
        folder: that it is started in; None: this process's.

    Raises:
        StartError: it ended, or took too long.
    """
    is_late = threading.Event()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env=pairs.environment(),
        ) as process,
    ):

        def give_up() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(timeout_s or 0, give_up)
        if timeout_s is not None:
            timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"workload"'):
                    found: dict[str, float] = json.loads(line)
                    found.pop("workload")
                    return found
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
        if is_late.is_set():
            raise StartError(f"not done within {timeout_s:g} s")
        errors.seek(0)
        raise StartError(pairs.why_ended(code, errors.read()))


def by_turns(
    pair: Pair, sides: Mapping[str, Sequence[str]], starts: int, timeout_s: float
) -> list[Run]:
    """Start each side once, and then by turns as often as is asked for; tell the medians.

    Args:
        pair: what is compared.
        sides: name -> how it is run, but for the workloads.
        starts: that count, of each side.
        timeout_s: how long one may take.
    """
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    failed: dict[str, str] = {}
    for turn in range(1 + starts):
        for side, command in sides.items():
            if side in failed:
                continue
            try:
                told = start([*command, "--workloads", WORKLOAD], timeout_s, pairs.ROOT)
            except StartError as error:
                failed[side] = str(error)
                continue
            except OSError as error:
                failed[side] = pairs.why_not_started(error)
                continue
            if turn:
                found[side].append(told)
    return [
        Run(pair, side, (COLD,), {COLD: medians(of)} if of else {}, failed=failed.get(side))
        for side, of in found.items()
    ]


def medians(starts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {figure: median(one[figure] for one in starts) for figure in starts[0]}
