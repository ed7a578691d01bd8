"""A benchmark as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from onnxport.errors import ProviderError, RequestError
from onnxport.serving.bench.records import RequestRecord

FORMATS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Refuse what cannot be drawn, before anything is measured.

    Raises:
        RequestError: the format is not one of FORMATS.
        ProviderError: matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise RequestError(f"a plot cannot be written to {path.name}; end it in .png, .svg or .pdf")
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ProviderError(
            'matplotlib is not installed, which draws; `pip install "onnxport[bench]"`'
        ) from error
    mpl.use("Agg")


def draw(title: str, records: Sequence[RequestRecord], path: Path) -> None:
    """Draw which share of requests or gaps took at most how long."""
    check(path)
    from matplotlib import pyplot as plt

    good = [record for record in records if record.error is None]
    curves = {
        "time to first token": [one.ttft_s for one in good if one.ttft_s is not None],
        "inter-token latency": [gap for one in good for gap in one.itl_s],
        "whole request": [one.e2e_s for one in good],
    }
    figure, axes = plt.subplots(1, len(curves), figsize=(4.0 * len(curves), 3.2), squeeze=False)
    for ax, (name, seconds) in zip(axes[0], curves.items(), strict=True):
        ordered = sorted(1000 * value for value in seconds)
        shares = [100 * (index + 1) / len(ordered) for index in range(len(ordered))]
        ax.step(ordered, shares, where="post")
        ax.set(title=name, xlabel="ms", ylabel="% at most", ylim=(0, 100))
        ax.grid(linewidth=0.3)
    figure.suptitle(textwrap.fill(title, 120), fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
