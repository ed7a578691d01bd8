"""Runs that belong together, kept in a file, so that an interrupted comparison goes on later.

A pair is onnxport and one peer on one group of workloads in one round, each in a process of its
own, one right after the other. Only a whole pair counts. Workloads that are asked for later are run
by both sides, too, and those of before stay.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

OURS = "onnxport"
ROOT = Path(__file__).parents[1]
FAILED_LINES = 3
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:'\"]+/)+")


@dataclass(frozen=True, slots=True)
class Pair:
    """What is compared once."""

    round: int  # from 0
    peer: str
    group: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Of what a run tells: it may be added to runs of another day, and of other code."""

    about: str  # the side: its versions, its weights
    date: str  # of the run, in ISO's form
    options: str  # of the command that asked for it


@dataclass(frozen=True, slots=True)
class Run:
    """One side of a pair."""

    pair: Pair
    side: str  # OURS, or the peer
    workloads: tuple[str, ...]
    figures: Mapping[str, Mapping[str, float]]  # by workload, "cold" among them
    skipped: Mapping[str, str] = field(default_factory=dict)  # workload -> why
    failed: str | None = None  # why it ended early
    origin: Origin | None = None  # None: older runs did not note it

    def line(self) -> str:
        """As it is kept."""
        pair = {"round": self.pair.round, "peer": self.pair.peer, "group": self.pair.group}
        own = {"side": self.side, "workloads": self.workloads, "figures": self.figures}
        own |= {"skipped": self.skipped, "failed": self.failed}
        origin = None if self.origin is None else asdict(self.origin)
        return json.dumps(pair | own | {"origin": origin})

    def without(self, workloads: Set[str]) -> Run | None:
        """Return the run of the other workloads; None: there are none."""
        rest = tuple(each for each in self.workloads if each not in workloads)
        if not rest:
            return None
        figures = {name: each for name, each in self.figures.items() if name not in workloads}
        skipped = {name: each for name, each in self.skipped.items() if name not in workloads}
        ended = all(name in figures or name in skipped for name in rest)
        failed = None if ended else self.failed
        return replace(self, workloads=rest, figures=figures, skipped=skipped, failed=failed)

    @classmethod
    def read(cls, line: str) -> Run:
        """Read what `line` wrote."""
        found: dict[str, Any] = json.loads(line)
        pair = Pair(found.pop("round"), found.pop("peer"), found.pop("group"))
        if (origin := found.pop("origin", None)) is not None:
            found["origin"] = Origin(**origin)
        return cls(pair, found.pop("side"), tuple(found.pop("workloads")), **found)


class Store:
    """The runs so far, one a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.runs = [Run.read(line) for line in lines if line]

    def missing(self, pair: Pair, workloads: Iterable[str], *, retry: bool) -> list[str]:
        """Return those of some workloads that not both sides of a pair have run.

        Args:
            pair: which.
            workloads: that they have to have run.
            retry: a run that failed does not count.
        """
        done = {
            (run.side, workload)
            for run in self.runs
            if run.pair == pair and not (retry and run.failed)
            for workload in run.workloads
        }
        return [each for each in workloads if not {(OURS, each), (pair.peer, each)} <= done]

    def replace(self, pair: Pair, runs: Sequence[Run]) -> None:
        """Keep the runs of a pair instead of older ones of the same workloads."""
        again = {workload for run in runs for workload in run.workloads}
        kept = [run.without(again) if run.pair == pair else run for run in self.runs]
        self.runs = [run for run in kept if run is not None] + list(runs)
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(run.line() + "\n" for run in self.runs))
        partial.replace(self._path)


def environment() -> dict[str, str]:
    """The environment of a runner.

    It may use the bytecode of a checkout, whatever the caller's environment says: an installed
    package has its own, and compiling every module would be a part of each cold start.
    """
    return {name: value for name, value in os.environ.items() if name != NO_BYTECODE}


def why_ended(code: int, errors: str) -> str:
    """What is told of a process that failed: its exit code, and the end of its errors."""
    last = [line for line in errors.splitlines() if line.strip()][-FAILED_LINES:]
    return FOLDERS.sub("", f"exit code {code}: {' | '.join(last)}")


def why_not_started(error: OSError) -> str:
    """What is told of a program that is missing, or may not be run."""
    return FOLDERS.sub("", f"it did not start: {error}")


def run(
    pair: Pair, side: str, command: Sequence[str], workloads: Sequence[str], timeout_s: float
) -> Run:
    """Start a runner afresh and read what it prints; what it printed before a failure stays."""
    given = [*command, "--workloads", ",".join(workloads)]
    failed: str | None = None
    try:
        done = subprocess.run(
            given,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=ROOT,
            env=environment(),
        )
        out = done.stdout
        if done.returncode:
            failed = why_ended(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        out = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        failed = f"not done within {timeout_s:g} s"
    except OSError as error:
        out, failed = "", why_not_started(error)
    figures: dict[str, dict[str, float]] = {}
    skipped: dict[str, str] = {}
    for line in out.splitlines():
        if line.startswith('{"workload"'):
            found = json.loads(line)
            workload = found.pop("workload")
            if "skipped" in found:
                skipped[workload] = found["skipped"]
            else:
                figures[workload] = found
    return Run(pair, side, tuple(workloads), figures, skipped, failed)
