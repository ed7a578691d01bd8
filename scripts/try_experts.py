"""Try ONNX Runtime's own kernel for quantized experts on a device, against NumPy.

    python scripts/try_experts.py webgpu          # an adapter that WebGPU finds
    python scripts/try_experts.py cuda

One layer, as the exporter writes it, for some numbers of experts, rows and chosen ones, several
times each: what is printed is how often a result was wrong, and by how much of its largest number.
Of experts whose logits are equal any may be chosen. Where nothing is wrong, a provider may be told
to keep `QMoE`; until then `split_experts` writes experts in standard operators (docs/providers.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import combinations
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.experts import LEFT_OUT, ExpertWeights, Routing, expert_layer
from onnxport.providers.cuda import CudaProvider
from onnxport.providers.ort import CPU, Target, quiet_options, start_session
from onnxport.providers.placement import placement
from onnxport.providers.webgpu import WebGpuProvider

HIDDEN, BLOCK, TIMES = 64, 32, 20
SIZES: Final = ((4, 2), (32, 4), (128, 8))  # experts, and how many of them a row is given to
ROWS: Final = (1, 2, 7, 40)
TOLERANCE: Final = {"float32": 1e-4, "float16": 2e-2}  # of the largest number of a result
TYPES: Final = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
Array = NDArray[Any]


def main() -> None:
    """Try all sizes; says which execution provider ran them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("device", choices=["cpu", "cuda", "webgpu"])
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4)
    parser.add_argument("--dtype", choices=sorted(TYPES), default="float16")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="features, a multiple of 32")
    parser.add_argument("--drop", action="append", default=[], help="attributes to leave out")
    given = parser.parse_args()
    target = _target(given.device)
    for count, per_token in SIZES:
        model, weights = layer(given.bits, given.dtype, given.hidden, count, per_token, given.drop)
        session = start_session(model.SerializeToString(), None, quiet_options(), target)
        print(f"{count} experts, {per_token} chosen, on {dict(placement(session))}")
        for kind, rows in ((kind, rows) for kind in ("drawn", "tied", "left out") for rows in ROWS):
            x, logits = inputs(kind, rows, given.hidden, count, per_token)
            dtype = helper.tensor_dtype_to_np_dtype(TYPES[given.dtype])
            x, logits = x.astype(dtype), logits.astype(dtype)
            given_to = x.astype(np.float32), logits.astype(np.float32)
            meant = expected(*weights, *given_to, per_token)
            errors = [
                error_of(session.run(None, {"x": x, "router": logits})[0], meant)
                for _ in range(TIMES)
            ]
            wrong = sum(not error <= TOLERANCE[given.dtype] for error in errors)
            worst = np.max(errors)  # NaN where one is
            print(f"  {rows:3} rows {kind:8}: {wrong:2} of {TIMES} wrong, at worst {worst:.1e}")


def _target(device: str) -> Target:
    if device == "cpu":
        return CPU
    return WebGpuProvider()._adapter.target if device == "webgpu" else CudaProvider()._target()


def layer(
    bits: int, dtype: str, hidden: int, count: int, per_token: int, drop: list[str]
) -> tuple[onnx.ModelProto, tuple[Array, Array]]:
    """A layer of random weights, and these as they are meant, [experts, rows, columns]."""
    g, kind = GraphBuilder("layer"), helper.tensor_dtype_to_np_dtype(TYPES[dtype])
    made = list(_weights(bits, kind, ((count, 2 * hidden, hidden), (count, hidden, hidden))))
    names = [
        g.constant(value, "stored") for quants, scales, _ in made for value in (quants, scales)
    ]
    weights = ExpertWeights(
        count=count,
        gate_up=names[0],
        gate_up_scales=names[1],
        down=names[2],
        down_scales=names[3],
        bits=bits,
        block_size=BLOCK,
    )
    x = g.input("x", TYPES[dtype], ["rows", hidden])
    logits = g.input("router", TYPES[dtype], ["rows", count])
    routing = Routing(per_token=per_token, normalized=True)
    y = expert_layer(g, x, logits, weights, routing, dtype=TYPES[dtype], accuracy_level=1)
    g.node("Identity", [y], outputs=[g.output("y", TYPES[dtype], ["rows", hidden])])
    model = g.build()
    for node in model.graph.node:
        kept = [attribute for attribute in node.attribute if attribute.name not in drop]
        del node.attribute[:]
        node.attribute.extend(kept)
    return model, (made[0][2], made[1][2])


def _weights(
    bits: int, kind: np.dtype[Any], shapes: tuple[tuple[int, int, int], ...]
) -> Iterator[tuple[Array, Array, Array]]:
    """Quants, scales, and what they stand for, of products that keep the size of their input."""
    random = np.random.default_rng(3)
    for experts, rows, columns in shapes:
        shape = (experts, rows, columns // BLOCK)
        scales = (1 + random.random(shape)) / 2 ** (bits - 1) / np.sqrt(columns)
        quants = random.integers(0, 256, (experts, rows, columns * bits // 8), np.uint8)
        levels = np.stack([quants & 15, quants >> 4], axis=-1) if bits == 4 else quants
        centred = levels.reshape(*shape, BLOCK) - np.float32(2 ** (bits - 1))
        stored = scales.astype(kind)
        meant = centred * stored[..., None].astype(np.float32)
        yield quants, stored, meant.reshape(experts, rows, columns)


def inputs(kind: str, rows: int, hidden: int, count: int, per_token: int) -> tuple[Array, Array]:
    """Activations, and logits that are drawn, equal in part, or far below but for those chosen."""
    random = np.random.default_rng(rows)
    x, logits = random.standard_normal((rows, hidden)), 2 * random.standard_normal((rows, count))
    if kind == "tied":
        logits = np.round(logits)
    if kind == "left out":
        order = np.argsort(-logits, axis=-1, kind="stable")
        np.put_along_axis(logits, order[:, per_token:], LEFT_OUT, axis=-1)
    return x, logits


def expected(gate_up: Array, down: Array, x: Array, logits: Array, per_token: int) -> list[Array]:
    """The definition, row by row: all results that it allows, [choices, columns].

    Experts that have the last of the chosen logits may be more than there is room for; whichever of
    them are chosen is right, with the same shares.
    """
    allowed = []
    for values, scores in zip(x, logits, strict=True):
        ranked = np.sort(scores)[::-1][:per_token]
        shares = np.exp(ranked - ranked[0])
        shares /= shares.sum()
        certain = np.flatnonzero(scores > ranked[-1])
        tied = np.flatnonzero(scores == ranked[-1])
        room = per_token - len(certain)
        outputs = {
            expert: _output(gate_up[expert], down[expert], values) for expert in (*certain, *tied)
        }
        certain = certain[np.argsort(-scores[certain], kind="stable")]
        base = sum(
            (share * outputs[expert] for share, expert in zip(shares, certain, strict=False)),
            np.zeros(len(values)),
        )
        choices = combinations(tied, room)
        allowed.append(
            np.stack([base + shares[-1] * sum(outputs[one] for one in each) for each in choices])
        )
    return allowed


def _output(gate_up: Array, down: Array, values: Array) -> Array:
    """What one expert makes of a row."""
    gate, up = (gate_up[turn::2] @ values for turn in (0, 1))
    result: Array = down @ (gate / (1 + np.exp(-gate)) * up)
    return result


def error_of(found: Array, allowed: list[Array]) -> float:
    """The largest error of a result, as a share of its largest number; NaN where it has one.

    Each row is compared with that of its allowed results which is nearest.
    """
    largest = max(float(np.abs(each).max()) for each in allowed)
    rows = [
        np.abs(each - row.astype(np.float32)).max(axis=1).min()
        for row, each in zip(found, allowed, strict=True)
    ]
    return float(np.max(rows)) / largest


if __name__ == "__main__":
    main()
