"""Products of which few outputs must be exact: cases, and what must hold of their outputs.

`exact` has a number for each row. If it is 1 to 64, so many of the row's largest outputs, and what
equals the last of them, have the bits of the whole product, and all others are less. `allowed` has
a bit for each output, and then that is said of those whose bit is set; a number of -1 means all of
these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxport.graphs.inspect import set_input
from onnxport.graphs.noise import GROUP, Noise
from tests.kernels import matmul_cases
from tests.kernels.matmul_cases import Floats, MatMulCase

MOST = 64  # outputs of a row that can be asked for
ALL_ALLOWED = -1
MOST_BLOCKS = 300  # of inputs
GROWING_CALLS = 8  # in which four bits of the weights are taken apart
WIDTHS = (1, 33, 96, 1200, 4096)
DEPTHS = (1, 31, 100, 128, 257, 896)


def random_case(seed: int) -> MatMulCase:
    """One whose weights have eight bits but are never -128, with up to as many rows as can gain."""
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice(matmul_cases.BLOCK_SIZES))
    n, k, rows = int(rng.choice(WIDTHS)), int(rng.choice(DEPTHS)), int(rng.integers(1, 17))
    case = matmul_cases.make_case(seed, 8, block_size, k, n, rows)
    return case.replace(quants=np.maximum(case.quants, 1))


def random_exact(rng: np.random.Generator, rows: int) -> NDArray[np.int32]:
    """As many outputs of each row as one, or as few as in most requests, or as can be."""
    return np.minimum(rng.geometric(0.1, rows), MOST).astype(np.int32)


class Asked(NamedTuple):
    """What a call asks for."""

    exact: NDArray[np.int32]  # [rows]
    allowed: NDArray[np.int32] | None = None  # [rows, words]; None: all
    races: NDArray[np.float64] | None = None  # [rows, 2]: number, 1 / temperature or 0; None: none

    def feeds(self) -> dict[str, NDArray[Any]]:
        """As inputs of a model that `add_asked` made."""
        words = np.empty((0, 1), np.int32) if self.allowed is None else self.allowed
        races = np.empty((0, 2)) if self.races is None else self.races
        return {"exact": self.exact, "allowed": words, "races": races}


def random_allowed(rng: np.random.Generator, rows: int, n: int) -> NDArray[np.int32]:
    """Outputs of each row: all, some panels, a share of them, few, or none."""
    words = -(-n // 32)
    found = np.zeros((rows, words), np.int32)
    for row in found:
        kind = rng.integers(7)
        if kind == 0:
            row[:] = -1
        elif kind == 1:
            row[rng.random(words) < 0.3] = -1
        elif kind < 6:
            bits = rng.random(32 * words) < (0.001, 0.02, 0.5, 0.95)[kind - 2]
            row[:] = np.packbits(bits, bitorder="little").view(np.int32)
    return found


def random_asked(rng: np.random.Generator, rows: int, n: int) -> Asked:
    """Some calls allow all outputs of all rows; in others some rows ask for all that is allowed."""
    exact = random_exact(rng, rows)
    races = random_races(rng, rows) if rng.random() < 0.5 else None
    if rng.random() < 0.3:
        return Asked(exact, None, races)
    exact[rng.random(rows) < rng.choice([0.0, 0.3, 1.0])] = ALL_ALLOWED
    return Asked(exact, random_allowed(rng, rows, n), races)


def random_races(rng: np.random.Generator, rows: int) -> NDArray[np.float64]:
    """Some rows take the largest outputs, others draw, at any temperature."""
    races = np.stack([rng.random(rows), 10.0 ** rng.uniform(-3, 3, rows)], axis=1)
    races[rng.random(rows) < 0.3] = 0
    return races


def case_of(levels: NDArray[np.int64], x: Floats, scales: Floats | float = 0.01) -> MatMulCase:
    """A case of weights [N, K], K a multiple of 128, and scales [N, blocks] or one for all."""
    n, k = levels.shape
    return MatMulCase(
        bits=8,
        block_size=128,
        x=x.astype(np.float32),
        quants=(levels + 128).astype(np.uint8).reshape(n, k // 128, 128),
        scales=np.broadcast_to(np.float32(scales), (n, k // 128)).copy(),
    )


def gaussian_case(seed: int, n: int, k: int, rows: int) -> MatMulCase:
    """Weights as those of a model: half scales, each block's largest weight at 127."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((n, k // 128, 128), np.float32)
    scales = (np.abs(weights).max(-1) / 127).astype(np.float16).astype(np.float32)
    levels = np.clip(np.rint(weights / scales[..., None]), -127, 127).astype(np.int64)
    return case_of(levels.reshape(n, k), rng.standard_normal((rows, k)), scales)


def near_ties(seed: int, n: int, k: int, rows: int) -> MatMulCase:
    """Four bits cannot tell the largest outputs apart: in an eighth of the panels, one each."""
    rng = np.random.default_rng(seed)
    base = rng.integers(-100, 101, k)
    levels = rng.integers(-20, 21, (n, k))
    close = rng.permutation(n // 32)[: n // 256] * 32
    levels[close] = base + rng.integers(-2, 3, (len(close), k))
    return case_of(levels, base / 60 + rng.standard_normal((rows, k)))


def dither(count: int) -> NDArray[np.int64]:
    """That of each input: 0 to 16, from SplitMix64 of its place."""
    with np.errstate(over="ignore"):
        value = np.arange(count, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((value ^ (value >> np.uint64(31))) % np.uint64(17)).astype(np.int64)


def misleading(errors: Sequence[float], n: int = 4096, k: int = 256) -> MatMulCase:
    """Outputs far above all others, each in a panel of its own, of which four bits say too little.

    So many standard deviations too little; of negative `errors`, too much. The first output is the
    largest one, barely, and so on.
    """
    rng = np.random.default_rng(1)
    signs = rng.choice([-1, 1], k)
    levels = rng.integers(-20, 21, (n, k))
    for place, wrong in enumerate(errors):
        aim = round(wrong * np.sqrt(24 * k))
        error = np.zeros(k, np.int64)  # of the weights along the signs, -8 to 8
        while error.sum() != aim:
            error[rng.integers(k)] += np.sign(aim - error.sum())
            error = np.clip(error, -8, 8)
        # w = 17 u - 119 - d + e, whose sum along the signs is nearly that of the other rows.
        bias = -119 - dither(k) + error * signs
        steps = np.rint((60 * signs - bias) / 17).astype(np.int64)
        weights = 17 * steps + bias
        for i in rng.permutation(k):
            if (weights * signs).sum() < 60 * k - 20 * place:
                weights[i] += 17 * signs[i]
            if (weights * signs).sum() >= 60 * k - 20 * place + 17:
                weights[i] -= 17 * signs[i]
        levels[place * 320 + 7] = weights
    return case_of(levels, signs[None])


def _by_blocks(
    rows: Sequence[NDArray[np.int8]], block_size: int, x: float, scale: float
) -> MatMulCase:
    """In the first panels an output each whose weights are one level a block; others are noise.

    Each of `rows` is [blocks]. All inputs are `x`, all scales `scale`.
    """
    k, n = len(rows[0]) * block_size, 96
    levels = np.random.default_rng(1).integers(-3, 4, (n, k), np.int8)
    for panel, row in enumerate(rows):
        levels[32 * panel + 7] = np.repeat(row, block_size)
    return MatMulCase(
        bits=8,
        block_size=block_size,
        x=np.full((1, k), x, np.float32),
        quants=(levels.view(np.uint8) ^ 128).reshape(n, -1, block_size),
        scales=np.full((n, k // block_size), scale, np.float32),
    )


def swallowed() -> MatMulCase:
    """The largest output is 300 blocks of 7.7 times the smallest float, and what four bits say, 0.

    Their sums are a 17th of that: less than half of the smallest float, block by block. Another
    output is of 100 blocks of twice as much, which four bits see.
    """
    hidden, other = np.full(MOST_BLOCKS, 64, np.int8), np.zeros(MOST_BLOCKS, np.int8)
    other[:100] = 127
    x, smallest = 1e-20, float(np.finfo(np.float32).smallest_subnormal)
    return _by_blocks([hidden, other], 16, x, 7.7 * smallest / (16 * 64 * x))


def overflowing() -> MatMulCase:
    """An output overflows on the way: 200 blocks make 3.6e38, and 100 more take half of it off.

    So it is infinite; four bits, whose sums are a 17th, say 1.8e38. Another one, 2.2e38 all the
    time, is larger than that.
    """
    hidden, other = np.full(MOST_BLOCKS, 127, np.int8), np.zeros(MOST_BLOCKS, np.int8)
    hidden[200:] = -127
    other[:120] = 127
    return _by_blocks([hidden, other], 256, 1e12, 3.6e38 / (200 * 256 * 127 * 1e12))


def add_exact(serialized: bytes) -> bytes:
    """The model with the input `exact`."""
    of = onnx.load_from_string(serialized)
    node = of.graph.node[0]
    set_input(node, 6, "exact")
    of.graph.input.append(helper.make_tensor_value_info("exact", TensorProto.INT32, ["numbers"]))
    return of.SerializeToString()


def add_asked(serialized: bytes) -> bytes:
    """The model with the inputs `exact`, `allowed` and `races`."""
    of = onnx.load_from_string(add_exact(serialized))
    node = of.graph.node[0]
    set_input(node, 12, "allowed")
    set_input(node, 13, "races")
    info, dims = helper.make_tensor_value_info, ["some", "words"]
    of.graph.input.append(info("allowed", TensorProto.INT32, dims))
    of.graph.input.append(info("races", TensorProto.DOUBLE, ["drawn", 2]))
    return of.SerializeToString()


def numbers(exact: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    return np.asarray(exact, np.int32)


def with_calls(case: MatMulCase, seed: int) -> tuple[MatMulCase, list[Asked]]:
    """As many calls as grow everything and some more, and what each asks for."""
    rng = np.random.default_rng(seed)
    return case, [random_asked(rng, len(case.x), case.n) for _ in range(GROWING_CALLS + 6)]


def check(
    found: Floats,
    whole: Floats,
    exact: NDArray[np.int32],
    allowed: NDArray[np.int32] | None = None,
    races: NDArray[np.float64] | None = None,
) -> None:
    """Checks outputs [rows, N] against those of the whole product.

    What a row draws by is larger by its noise: that is what must hold of these sums.
    """
    for row, count in enumerate(exact):
        got, wanted = found[row], whole[row]
        noise = np.zeros(len(wanted))
        scale = 1.0
        if races is not None and races[row, 1] > 0:
            groups = np.arange(-(-len(wanted) // GROUP))
            scale = races[row, 1]
            noise = Noise(races[row, 0], len(wanted)).of(groups).ravel()[: len(wanted)]
        if allowed is not None:
            bits = bits_of(allowed[row], len(wanted))
            assert np.isfinite(got[~bits]).all(), row
            got, wanted, noise = got[bits], wanted[bits], noise[bits]
        if not len(wanted):
            continue
        sums = wanted * scale + noise
        last = np.sort(sums)[0 if count == ALL_ALLOWED else -min(count, len(wanted))]
        largest = sums >= last
        assert got[largest].tobytes() == wanted[largest].tobytes(), row
        assert np.all(got[~largest] * scale + noise[~largest] < last), row


def bits_of(words: NDArray[np.int32], n: int) -> NDArray[np.bool_]:
    """Which of n outputs the words of a row allow."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:n].astype(bool)


def deviations(case: MatMulCase) -> NDArray[np.float64]:
    """The standard deviation of each approximate output, [rows, N], by the theory of coarse.h."""
    quants, scales = matmul_cases.quantize(case)
    rows = (quants.astype(np.float64) ** 2).sum(-1) * scales.astype(np.float64) ** 2
    found: NDArray[np.float64] = np.sqrt(24 * rows @ (case.scales.astype(np.float64) ** 2).T)
    return found
