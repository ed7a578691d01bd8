"""Runs as tables: medians, and ratios of the two sides of each pair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.cold import COLD
from benchmarks.pairs import OURS, Run

BEGIN, END = "<!-- benchmarks.run_all begins: {} -->", "<!-- benchmarks.run_all ends: {} -->"
LESS_IS_BETTER = {"ttft_s", "wall_s", "itl_ms", "itl_p99_ms", "peak_rss_mib", "first_token_s"}
TITLES = {
    "decode_tok_s": "decode tok/s",
    "prefill_tok_s": "prefill tok/s",
    "output_tok_s": "output tok/s",
    "itl_ms": "inter-token ms",
    "ttft_s": "first token s",
    "wall_s": "wall s",
    "peak_rss_mib": "peak resident MiB",
    "first_token_s": "cold start to first token s",
}
HEADLINES = {
    COLD: ("first_token_s", "peak_rss_mib"),
    "W1": ("decode_tok_s", "prefill_tok_s", "peak_rss_mib"),
    "W2": ("output_tok_s", "decode_tok_s", "prefill_tok_s", "peak_rss_mib"),
    "W3": ("output_tok_s", "itl_ms", "peak_rss_mib"),
    "W4": ("ttft_s", "peak_rss_mib"),
    "W5": ("wall_s", "ttft_s", "peak_rss_mib"),
    "W6": ("output_tok_s", "itl_ms", "peak_rss_mib"),
    "S": ("output_tok_s", "itl_ms", "peak_rss_mib"),
    "C": ("decode_tok_s", "prefill_tok_s", "peak_rss_mib"),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one workload against one peer."""

    workload: str
    figure: str
    peer: str
    ours: tuple[float, ...]  # one a round
    theirs: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """How many times better onnxport was, a round; above 1 it was better."""
        pairs = zip(self.ours, self.theirs, strict=True)
        if self.figure in LESS_IS_BETTER:
            return tuple(theirs / ours for ours, theirs in pairs)
        return tuple(ours / theirs for ours, theirs in pairs)


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Compare what both sides of pairs have, in the order of the headlines.

    How a process started that then ran workloads is no figure: the first one after a change of the
    code would count, and what ran before it. Cold starts are pairs of their own.
    """
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    sides = {
        (run.pair, run.side, workload): figures
        for run in runs
        for workload, figures in run.figures.items()
    }
    for (pair, side, workload), ours in sides.items():
        theirs = sides.get((pair, pair.peer, workload))
        if side != OURS or theirs is None or (workload == COLD) != (pair.group == COLD):
            continue
        for figure in headlines(workload):
            values = ours[figure], theirs[figure]
            found.setdefault((workload, figure, pair.peer), []).append(values)
    keys = sorted(found, key=lambda key: (_order(key[0]), headlines(key[0]).index(key[1]), key[2]))
    return [Comparison(*key, *zip(*found[key], strict=True)) for key in keys]


def headlines(workload: str) -> tuple[str, ...]:
    """The figures of a workload that are told."""
    return HEADLINES.get(workload) or HEADLINES.get(workload[0], ())


def _order(workload: str) -> tuple[int, str, int]:
    if workload == COLD:
        return 0, "", 0
    return 1 + "WSC".index(workload[0]), workload[0], int(workload[1:])


def table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: a row a figure, a column a side.

    A peer's column has its median, and how many times better onnxport was: the median of the
    pairs' ratios and, of several, their range.
    """
    peers = sorted({one.peer for one in comparisons})
    rows: dict[tuple[str, str], dict[str, Comparison]] = {}
    for one in comparisons:
        rows.setdefault((one.workload, one.figure), {})[one.peer] = one
    yield f"| workload | figure | {OURS} | {' | '.join(peers)} |"
    yield "|---" * (3 + len(peers)) + "|"
    for (workload, figure), row in rows.items():
        ours = median(value for one in row.values() for value in one.ours)
        cells = [_cell(row[peer]) if peer in row else "–" for peer in peers]
        yield f"| {workload} | {TITLES[figure]} | {ours:.4g} | {' | '.join(cells)} |"


def _cell(one: Comparison) -> str:
    ratios = one.ratios
    span = f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{median(one.theirs):.4g}: {median(ratios):.2f}×{span}"


def gaps(runs: Iterable[Run]) -> Iterator[str]:
    """Yield what did not run, and why, each once."""
    told = set()
    for run in runs:
        found = [f"{run.side} skips {name}: {why}" for name, why in run.skipped.items()]
        if run.failed:
            found.append(f"{run.side} on {', '.join(run.workloads)}: {run.failed}")
        for text in found:
            if text not in told:
                told.add(text)
                yield f"- {text}"


def days(runs: Iterable[Run]) -> str:
    """The day of the runs, or the first and the last."""
    found = sorted({run.origin.date for run in runs if run.origin is not None})
    if len(found) < 2:
        return found[0] if found else "on an unnoted day"
    return f"{found[0]} to {found[-1]}"


def options(runs: Iterable[Run]) -> list[str]:
    """The options of all commands that runs are of, each once, in their order."""
    return list(dict.fromkeys(run.origin.options for run in runs if run.origin is not None))


def sides(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what was compared, ours first: a line for each that a side was in these runs."""
    for side in sorted({run.side for run in runs}, key=lambda name: (name != OURS, name)):
        own = [run for run in runs if run.side == side]
        each = dict.fromkeys(run.origin.about for run in own if run.origin is not None)
        for about in each:
            of = [run for run in own if run.origin is not None and run.origin.about == about]
            when = f" ({days(of)})" if len(each) > 1 else ""
            yield f"- {side}: {about}{when}"
        if any(run.origin is None for run in own):
            yield f"- {side}: some runs of older benchmarks, which did not note versions"


def write_section(path: Path, name: str, lines: Iterable[str]) -> None:
    """Put lines between a section's marks in a file, or at its end if it has none yet.

    Raises:
        SystemExit: the file has one of the marks, or has them in another order: what is between
            would be lost.
    """
    text = path.read_text() if path.exists() else "# Results\n"
    begin, end = BEGIN.format(name), END.format(name)
    section = "\n".join([begin, "", *lines, "", end])
    if begin in text or end in text:
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(end) < text.index(begin):
            raise SystemExit(
                f"{path} does not have {begin!r} and behind it {end!r}, each once; mend it, or "
                "remove both, and the section is written at its end"
            )
        before, _, rest = text.partition(begin)
        text = before + section + rest.partition(end)[2]
    else:
        text = text.rstrip("\n") + "\n\n" + section + "\n"
    path.write_text(text)
