"""Studies as SVG: text stays text, lines are few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulate.studies import Lines

COLOURS = ("#1f5f8b", "#c0562b", "#4b7f52", "#7a5195")
DASHES = {"p99": "--", "bound": "--"}  # the second word of a line's name


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    lines: str  # which of the study's
    title: str
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False


FIGURES: Mapping[str, tuple[Panel, ...]] = {
    "load": (
        Panel("ttft", "TTFT of short requests", "requests a second", "seconds", log_y=True),
        Panel("inter-token", "Time between tokens, all", "requests a second", "seconds"),
    ),
    "cache": (
        Panel("hits", "Prompt tokens found in the cache", "pool, tokens", "share", log_x=True),
        Panel(
            "ttft", "TTFT with prefix caching on, off", "pool, tokens", "seconds", True, log_y=True
        ),
    ),
    "fairness": (
        Panel("ttft", "TTFT of light tenants", "flood, requests a second", "seconds", log_y=True),
        Panel("jain", "Jain's index under contention", "max_queued_requests", "", log_x=True),
    ),
    "bounds": (
        Panel("prefill", "A prompt while all others decode", "prompt, tokens", "steps"),
        Panel("inter-token", "Longest time between tokens", "flood's prompts, tokens", "seconds"),
        Panel("turns", "100 tokens beside floods", "flooding tenants", "steps", log_y=True),
    ),
}


def draw(name: str, study: Mapping[str, Lines], folder: Path) -> Path:
    """Write the figure of a study; returns its path."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9})
    from matplotlib import pyplot as plt

    panels = FIGURES[name]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.2))
    for panel, ax in zip(panels, axes, strict=True):
        families: dict[str, str] = {}
        for label, line in study[panel.lines].items():
            family, _, kind = label.partition(", ")
            colour = families.setdefault(family, COLOURS[len(families)])
            ax.plot(
                list(line), list(line.values()), DASHES.get(kind, "-"), color=colour, label=label,
                linewidth=1.3, marker=None if kind in DASHES else ".",
            )  # fmt: skip
        ax.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        if panel.log_x:
            ax.set_xscale("log", base=2)
        ax.set_yscale("log") if panel.log_y else ax.set_ylim(bottom=0)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", linewidth=0.3)
        if len(study[panel.lines]) > 1:
            ax.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    path = folder / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
