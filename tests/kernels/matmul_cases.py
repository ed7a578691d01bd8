"""Products with quantized weights: random cases, what they should give, and ONNX Runtime's run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs.inspect import set_input
from onnxport.graphs.passes.int8_matmul import OFFSETS, ZERO_POINTS

Floats = NDArray[np.float32]

BITS = (4, 8)
BLOCK_SIZES = (16, 32, 64, 128, 256)
# One feature, less than a panel of 32, ragged ones, whole ones, several tasks.
WIDTHS = (1, 7, 31, 32, 33, 64, 96, 129, 1200)
DEPTHS = (1, 5, 31, 32, 64, 100, 128, 257, 384, 896)
# Both sides of every border: groups of rows, equal and not, tiles, chunks.
ROWS = (1, 2, 3, 4, 5, 8, 9, 10, 15, 16, 17, 25, 31, 33, 48, 127, 129, 255, 257, 300)


@dataclass(frozen=True)
class MatMulCase:
    """One call of onnxport.MatMulNBits."""

    bits: int
    block_size: int
    x: Floats  # [..., K]
    quants: NDArray[np.uint8]  # [N, blocks, block_size * bits / 8]
    scales: Floats  # [N, blocks]
    # The quants are E2M1: levels are twice what they are, and scales half of what those are.
    is_fp4: bool = False
    zero_points: NDArray[np.uint8] | None = None  # [N, blocks], one each; None: the middle
    offsets: NDArray[np.float16] | None = None  # [N, blocks], added to each weight; None: nothing

    def replace(self, **changes: object) -> MatMulCase:
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def k(self) -> int:
        return self.x.shape[-1]

    @property
    def n(self) -> int:
        return self.quants.shape[0]

    @cached_property
    def levels(self) -> NDArray[np.int64]:
        """The quants as integers around their zero points, [N, blocks, block_size]."""
        if self.zero_points is None:
            return self.centred
        return self.centred + (1 << (self.bits - 1)) - self.zero_points.astype(np.int64)[..., None]

    @cached_property
    def centred(self) -> NDArray[np.int64]:
        """Likewise, around the middle: what is multiplied."""
        levels = self.quants
        if self.bits == 4:
            levels = np.stack([levels & 15, levels >> 4], -1).reshape(*levels.shape[:2], -1)
        if self.is_fp4:
            return twice_e2m1(levels.astype(np.int64))
        return levels.astype(np.int64) - (1 << (self.bits - 1))

    @property
    def stored_scales(self) -> Floats | NDArray[np.uint8]:
        """The scales as the operator's input has them: of E2M1 E8M0, 2^(byte - 127) or NaN."""
        if not self.is_fp4:
            return self.scales
        mantissas, exponents = np.frexp(self.scales)
        assert ((mantissas == 0.5) | np.isnan(mantissas)).all(), "no powers of two"
        return np.where(np.isnan(mantissas), 255, exponents - 1 + 128).astype(np.uint8)

    @property
    def stored_zero_points(self) -> NDArray[np.uint8]:
        """As the operator's input has them: at 4 bits two blocks to a byte, the even one low."""
        assert self.zero_points is not None
        if self.bits == 8:
            return self.zero_points
        blocks = self.zero_points.shape[1]
        even = np.pad(self.zero_points, ((0, 0), (0, blocks % 2)), constant_values=9)
        return even[:, ::2] | even[:, 1::2] << 4

    def blocks_of(self, x: Floats) -> Floats:
        """Rows [rows, K] cut into blocks, [rows, blocks, block_size], zeros after the end."""
        blocks = self.quants.shape[1]
        padded = np.zeros((len(x), blocks * self.block_size), x.dtype)
        padded[:, : self.k] = x
        return padded.reshape(len(x), blocks, self.block_size)

    def rows(self) -> Floats:
        """The activations as [rows, K]."""
        return self.x.reshape(-1, self.k)


def random_case(seed: int) -> MatMulCase:
    rng = np.random.default_rng(seed)
    bits, block_size = BITS[seed % 2], BLOCK_SIZES[seed // 2 % 5]
    n, k, rows = int(rng.choice(WIDTHS)), int(rng.choice(DEPTHS)), int(rng.choice(ROWS))
    case = make_case(seed, bits, block_size, k, n, rows)
    if seed % 7 in (3, 5):
        return with_zero_points(seed, case)
    return with_offsets(seed, case) if seed % 7 in (2, 4) else case


def with_zero_points(seed: int, case: MatMulCase) -> MatMulCase:
    """The same with random zero points, of which some are the middle."""
    rng = np.random.default_rng(seed + 1)
    zeros = rng.integers(0, 1 << case.bits, case.scales.shape, np.uint8)
    zeros[rng.integers(0, 4, zeros.shape) == 0] = 1 << (case.bits - 1)
    return case.replace(zero_points=zeros)


def with_offsets(seed: int, case: MatMulCase) -> MatMulCase:
    """The same with random offsets, larger and smaller than what they are added to, and none."""
    rng = np.random.default_rng(seed + 2)
    offsets = rng.standard_normal(case.scales.shape) * 0.02 * (1 << case.bits)
    offsets *= rng.choice([0, 1e-3, 0.1, 1, 10], case.scales.shape)
    return case.replace(offsets=offsets.astype(np.float16))


def make_case(seed: int, bits: int, block_size: int, k: int, n: int, rows: int) -> MatMulCase:
    rng = np.random.default_rng(seed)
    blocks = -(-k // block_size)
    # Magnitudes far apart, between rows and between the blocks of one.
    x = rng.standard_normal((rows, k)) * 10.0 ** rng.uniform(-3, 3, (rows, 1))
    x *= np.repeat(10.0 ** rng.uniform(-2, 2, (1, blocks)), block_size, 1)[:, :k]
    scales = rng.standard_normal((n, blocks)) * 0.02
    if seed % 3 == 1:  # such as are packed in 16 bits; zeros may be among them
        scales = np.where(np.abs(scales) < 1e-3, 0, scales).astype(np.float16)
    return MatMulCase(
        bits=bits,
        block_size=block_size,
        x=x.astype(np.float32),
        quants=rng.integers(0, 256, (n, blocks, block_size * bits // 8), np.uint8),
        scales=scales.astype(np.float32),
    )


def as_fp4(seed: int, case: MatMulCase, exponents: tuple[int, int]) -> MatMulCase:
    """The same nibbles as E2M1, with random scales: E8M0 from one to another."""
    first, last = exponents
    powers = np.random.default_rng(seed).integers(first, last + 1, case.scales.shape) - 128
    return case.replace(is_fp4=True, scales=np.ldexp(np.float32(1), powers.astype(np.int32)))


def quantize(case: MatMulCase) -> tuple[Floats, Floats]:
    """The activations' quants [rows, blocks, block_size] and scales [rows, blocks].

    As the kernel does it, in float32: scale max|x| / 127, quants rounded to nearest even.
    """
    blocks = case.blocks_of(case.rows())
    largest = np.abs(blocks).max(-1)
    usable = largest >= np.float32(1e-36)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=usable)
    scales = np.where(usable, largest / np.float32(127), np.float32(0))
    return np.rint(blocks * inverse[..., None]), scales


def expected(case: MatMulCase) -> NDArray[np.float64]:
    """What the quantized numbers give in float64, [rows, N]."""
    quants, scales = quantize(case)
    sums = np.einsum("rbi,nbi->rbn", quants.astype(np.float64), case.levels.astype(np.float64))
    weights = case.scales.T.astype(np.float64)[None]
    found = (sums * scales.astype(np.float64)[..., None] * weights).sum(1)
    if case.offsets is not None:
        found += (quants.sum(-1) * scales.astype(np.float64)) @ case.offsets.T.astype(np.float64)
    return np.asarray(found)


def product_bits(case: MatMulCase) -> Floats:
    """The bits of the product, [rows, N], where scales are powers of two.

    What a block adds is then a float32 times a power of two. Where that is a float32, `fma` is a
    sum; where it is too small or too large for one, float64 adds it.
    """
    quants, scales = quantize(case)
    total = np.zeros((len(quants), case.n), np.float32)
    for block in range(quants.shape[1]):
        sums = quants[:, block].astype(np.float64) @ case.levels[:, block].T.astype(np.float64)
        shares = sums.astype(np.float32) * scales[:, block, None]
        exact = shares.astype(np.float64) * case.scales[:, block].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = exact.astype(np.float32)
            wide = (total + exact).astype(np.float32)
            total = np.where(rounded == exact, total + rounded, wide)
    return total


def twice_e2m1(nibbles: NDArray[np.int64]) -> NDArray[np.int64]:
    """Twice what numbers of a sign, two bits of exponent and one of mantissa are.

    That is m / 2 with the exponent 0, and (1 + m / 2) * 2^(e - 1) with another one.
    """
    mantissas, exponents, signs = nibbles & 1, nibbles >> 1 & 3, nibbles >> 3
    magnitudes = np.where(
        exponents == 0, mantissas, (2 + mantissas) << np.maximum(exponents - 1, 0)
    )
    return magnitudes * (1 - 2 * signs)


def float_product(case: MatMulCase) -> NDArray[np.float64]:
    """The product with activations that are not rounded, [rows, N]."""
    blocks = case.blocks_of(case.rows()).astype(np.float64)
    return np.asarray(np.einsum("rbi,nbi->rn", blocks, weights_of(case)))


def rounding_bound(case: MatMulCase) -> NDArray[np.float64]:
    """How far rounding may take each output: sum over blocks of max|x| / 254 * sum|w|."""
    largest = np.abs(case.blocks_of(case.rows())).max(-1).astype(np.float64)
    return np.asarray(largest / 254 @ np.abs(weights_of(case)).sum(-1).T)


def weights_of(case: MatMulCase) -> NDArray[np.float64]:
    """[N, blocks, block_size]"""
    found = case.levels * case.scales.astype(np.float64)[..., None]
    return np.asarray(found if case.offsets is None else found + case.offsets[..., None])


def model(case: MatMulCase, constant: bool = True, **attributes: int) -> bytes:
    """A model of the one node; `attributes` replace the node's."""
    values = {
        "K": case.k,
        "N": case.n,
        "bits": case.bits,
        "block_size": case.block_size,
        **attributes,
    }
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="onnxport", **values)
    tensors = [numpy_helper.from_array(case.quants, "w"), numpy_helper.from_array(case.scales, "s")]
    if case.zero_points is not None:
        tensors.append(numpy_helper.from_array(case.stored_zero_points, "z"))
        set_input(node, ZERO_POINTS, "z")
    if case.offsets is not None:
        tensors.append(numpy_helper.from_array(case.offsets, "o"))
        set_input(node, OFFSETS, "o")
    shape = [f"rows{i}" for i in range(case.x.ndim - 1)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*shape, "depth"])]
    if not constant:
        inputs += [
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            for tensor in tensors
        ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*shape, "width"])]
    graph = helper.make_graph([node], "product", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("onnxport", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def add_bias(serialized: bytes, bias: Floats, constant: bool = True) -> bytes:
    """The model with a bias, an initializer or an input."""
    of = onnx.load_from_string(serialized)
    set_input(of.graph.node[0], 5, "bias")
    if constant:
        of.graph.initializer.append(numpy_helper.from_array(bias, "bias"))
    else:
        of.graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, bias.shape))
    return of.SerializeToString()


def magnitudes(case: MatMulCase) -> NDArray[np.float64]:
    """The largest that partial sums may become, [rows, N]: rounding is relative to that."""
    weights = np.abs(case.centred).sum(-1) + np.abs(case.levels - case.centred).sum(-1)
    largest = np.abs(case.blocks_of(case.rows())).max(-1).astype(np.float64)
    weights = weights * np.abs(case.scales.astype(np.float64))
    if case.offsets is not None:
        weights += np.abs(case.offsets.astype(np.float64)) * case.block_size
    return np.asarray(largest @ weights.T)


def session(library: Path, serialized: bytes, threads: int = 2) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors are raised anyway
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


def run(library: Path, case: MatMulCase, threads: int = 2) -> Floats:
    """[..., N]"""
    found: Floats = session(library, model(case), threads).run(["y"], {"x": case.x})[0]
    return found


def check(case: MatMulCase, found: Floats) -> None:
    """Checks the output against the rounded numbers, tightly, and against the exact ones."""
    found = found.reshape(-1, case.n).astype(np.float64)
    wanted = expected(case)
    magnitude = magnitudes(case)
    # Each block rounds three times in float32, and sums round as often as there are blocks.
    assert np.all(np.abs(found - wanted) <= 1e-6 * magnitude + 1e-30)
    norm = np.linalg.norm(wanted, axis=1, keepdims=True)
    assert np.all(np.abs(found - wanted) <= 1e-5 * norm + 1e-6 * magnitude)
    exact = float_product(case)
    assert np.all(np.abs(found - exact) <= rounding_bound(case) + 1e-6 * magnitude + 1e-30)
