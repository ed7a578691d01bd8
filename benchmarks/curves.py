"""Scaling curves as SVG, one line for onnxport and one for each peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.pairs import OURS, Run
from benchmarks.results import TITLES

COLOURS = ("#c0562b", "#1f5f8b", "#4b7f52", "#7a5195", "#8a7a2b", "#666666")


@dataclass(frozen=True, slots=True)
class Figure:
    """One picture."""

    name: str  # of the file
    letter: str  # that its workloads begin with; the rest is their place on the axis
    axis: str
    panels: tuple[str, ...]


FIGURES = (
    Figure("streams", "S", "streams", ("output_tok_s", "itl_ms", "peak_rss_mib")),
    Figure("contexts", "C", "tokens of context", ("decode_tok_s", "prefill_tok_s", "peak_rss_mib")),
)


def points(runs: Sequence[Run], figure: Figure, panel: str) -> dict[str, dict[int, float]]:
    """Medians by side and place; onnxport first, its runs beside all peers together."""
    found: dict[str, dict[int, list[float]]] = {OURS: {}}
    for run in runs:
        for workload, figures in run.figures.items():
            if workload[0] == figure.letter and workload[1:].isdigit():
                line = found.setdefault(run.side, {})
                line.setdefault(int(workload[1:]), []).append(figures[panel])
    return {
        side: {place: median(line[place]) for place in sorted(line)}
        for side, line in sorted(found.items(), key=lambda one: (one[0] != OURS, one[0]))
        if line
    }


def draw(runs: Sequence[Run], folder: Path, shape: str) -> list[Path]:
    """Draw the figures that there are points for; returns their files, SHAPE-FIGURE.svg."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "curves", "font.size": 9})
    from matplotlib import pyplot as plt

    written = []
    for figure in FIGURES:
        lines = [points(runs, figure, panel) for panel in figure.panels]
        if not any(lines):
            continue
        drawn, axes = plt.subplots(1, len(lines), figsize=(4.2 * len(lines), 3.4))
        for panel, sides, ax in zip(figure.panels, lines, axes, strict=True):
            for colour, (side, line) in zip(COLOURS, sides.items(), strict=False):
                width = 2.2 if side == OURS else 1.2
                ax.plot(
                    list(line), list(line.values()), ".-", color=colour, label=side, linewidth=width
                )
            ax.set(title=TITLES[panel], xlabel=figure.axis)
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:.0f}")
            ax.set_yscale("log") if panel == "itl_ms" else ax.set_ylim(bottom=0)
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(axis="y", linewidth=0.3)
        axes[0].legend(frameon=False, fontsize=7)
        drawn.tight_layout()
        folder.mkdir(parents=True, exist_ok=True)
        written.append(folder / f"{shape}-{figure.name}.svg")
        drawn.savefig(written[-1], metadata={"Date": None})
        plt.close(drawn)
    return written
