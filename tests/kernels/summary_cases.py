"""Rows of outputs and what a summary says of them, in NumPy."""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxport.graphs.contract import summary_floats
from onnxport.graphs.inspect import set_input

Floats = NDArray[np.float32]
CHUNK, GROUP, GROUPS = 1024, 64, 16


def expected(rows: Floats, scales: Floats) -> NDArray[np.float64]:
    """The summaries [num_rows, summary_floats(count)]; NaN where a scale leaves room for anything.

    And NaN where a chunk's smallest value is one.
    """
    found = np.full((len(rows), summary_floats(rows.shape[1])), np.nan)
    for row, to, scale in zip(rows, found, scales, strict=True):
        to[-1] = scale
        if scale < 0:
            continue
        chunks = [row[first : first + CHUNK] for first in range(0, len(row), CHUNK)]
        end = len(chunks) * GROUPS
        groups, (largest, least, sums) = to[:end], to[end:-1].reshape(3, -1)
        for number, chunk in enumerate(chunks):
            numbers = np.where(np.isnan(chunk), -np.inf, chunk).astype(np.float64)
            padded = np.append(numbers, np.full(CHUNK - len(chunk), -np.inf))
            groups[number * GROUPS :][:GROUPS] = padded.reshape(GROUPS, GROUP).max(1)
            largest[number] = numbers.max()
            least[number] = chunk.min()
            if scale == 0:
                continue
            sums[number] = 0
            if np.isfinite(largest[number]):
                sums[number] = np.exp2((numbers - numbers.max()) * float(scale)).sum()
    return found


def check(found: Floats, rows: Floats, scales: Floats, *, has_least: bool = True) -> None:
    """Assert that summaries are those of the rows: sums but for rounding, all else exactly.

    Without the smallest values these are all -inf.
    """
    wanted = expected(rows, scales)
    assert found.shape == wanted.shape
    chunks = (wanted.shape[1] - 1) // (GROUPS + 3)
    if not has_least:
        wanted[:, chunks * (GROUPS + 1) : chunks * (GROUPS + 2)] = -np.inf
    for one, other, row, scale in zip(found, wanted, rows, scales, strict=True):
        assert one[-1] == np.float32(scale)
        if scale < 0:
            continue
        end = chunks * (GROUPS + 2)
        np.testing.assert_array_equal(one[:end], other[:end])
        has_nan = np.isnan(other[chunks * (GROUPS + 1) : end])
        if scale > 0:  # which numbers beside NaN weigh is nobody's business
            sums, least = one[end:-1][~has_nan], other[end:-1][~has_nan]
            np.testing.assert_allclose(sums, least, rtol=1e-5)
        assert len(has_nan) * CHUNK >= len(row)


def add_summaries(serialized: bytes, *, scales: bool = True, output: bool = True) -> bytes:
    """The model with the input `scales`, and the output `summaries`."""
    of = onnx.load_from_string(serialized)
    node = of.graph.node[0]
    info, kind = helper.make_tensor_value_info, TensorProto.FLOAT
    if scales:
        set_input(node, 7, "scales")
        of.graph.input.append(info("scales", kind, ["numbers"]))
    if output:
        node.output.extend([""] * (3 - len(node.output)) + ["summaries"])
        of.graph.output.append(info("summaries", kind, ["rows", "floats"]))
    return of.SerializeToString()
