"""Thin builders of the operators that decoders use, where they read better than `node`.

Each returns value names. Shapes are those of ONNX Runtime's operator schemas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import TensorProto, helper

from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.contract import MICROSOFT

GELU_SCALE: Final = math.sqrt(2 / math.pi)
GELU_CUBE: Final = 0.044715


def rms_norm(g: GraphBuilder, x: str, weight: str, epsilon: float, name: str = "norm") -> str:
    """RMSNorm over the last axis; the mean square is computed in float32."""
    return g.node(
        "SimplifiedLayerNormalization",
        [x, weight],
        name=name,
        axis=-1,
        epsilon=epsilon,
        stash_type=1,
    )


def layer_norm(
    g: GraphBuilder, x: str, weight: str, epsilon: float, name: str = "norm", bias: str = ""
) -> str:
    """LayerNorm over the last axis; mean and variance are computed in float32."""
    inputs = [x, weight, bias] if bias else [x, weight]
    return g.node("LayerNormalization", inputs, name=name, axis=-1, epsilon=epsilon, stash_type=1)


def skip_rms_norm(
    g: GraphBuilder, x: str, skip: str, weight: str, epsilon: float, name: str = "norm"
) -> tuple[str, str]:
    """`total = x + skip` and its RMSNorm over the last axis; returns (normed, total)."""
    normed, _, _, total = g.node(
        "SkipSimplifiedLayerNormalization",
        [x, skip, weight],
        outputs=[".normed", "", "", ".total"],
        domain=MICROSOFT,
        name=name,
        epsilon=epsilon,
    )
    return normed, total


def silu(g: GraphBuilder, x: str) -> str:
    """`x * sigmoid(x)`, which ONNX Runtime fuses where it can."""
    return g.node("Mul", [x, g.node("Sigmoid", [x], name="sigmoid")], name="silu")


def gelu_tanh(g: GraphBuilder, x: str) -> str:
    """`x / 2 * (1 + tanh(GELU_SCALE * (x + GELU_CUBE * x³)))`, arXiv:1606.08415."""
    return g.node("Gelu", [x], name="gelu", approximate="tanh")


def gelu(g: GraphBuilder, x: str) -> str:
    """`x / 2 * (1 + erf(x / sqrt(2)))`, arXiv:1606.08415."""
    return g.node("Gelu", [x], name="gelu", approximate="none")


def relu(g: GraphBuilder, x: str) -> str:
    """`max(x, 0)`."""
    return g.node("Relu", [x], name="relu")


def relu_squared(g: GraphBuilder, x: str) -> str:
    """`max(x, 0)²`, arXiv:2109.08668."""
    positive = relu(g, x)
    return g.node("Mul", [positive, positive], name="squared")


@dataclass(frozen=True, slots=True)
class Xielu:
    """The numbers of a layer's xIELU, each a scalar of float32, as they are trained."""

    alpha_p: str  # the softplus of it is the curvature of what is positive
    alpha_n: str  # the softplus of it, plus beta, is times what is negative
    beta: str  # the slope at 0
    eps: str  # negative; what is above counts as that in the exponential


def xielu(g: GraphBuilder, x: str, numbers: Xielu, dtype: int) -> str:
    """`p x² + beta x` of positive x, `n (exp(min(x, eps)) - 1 - x) + beta x` of others.

    arXiv:2411.13010; `p = softplus(alpha_p)` and `n = beta + softplus(alpha_n)`. There is no Elu in
    it: ONNX Runtime's gives the last numbers of a range of some width other bits than the first.
    """

    def number(value: str, name: str) -> str:
        return value if dtype == TensorProto.FLOAT else cast(g, value, dtype, f"{name}.cast")

    p = number(g.node("Softplus", [numbers.alpha_p], name="p"), "p")
    part = g.node("Softplus", [numbers.alpha_n], name="n.softplus")
    n = number(g.node("Add", [part, numbers.beta], name="n"), "n")
    beta, eps = number(numbers.beta, "beta"), number(numbers.eps, "eps")
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    zero, one = g.constant(np.zeros((), kind), "zero"), g.constant(np.ones((), kind), "one")
    is_positive = g.node("Greater", [x, zero], name="is_positive")
    squared = g.node("Mul", [g.node("Mul", [x, x], name="square"), p], name="curve")
    power = g.node("Exp", [g.node("Min", [x, eps], name="below")], name="power")
    less_one = g.node("Sub", [power, one], name="less_one")
    bent = g.node("Mul", [g.node("Sub", [less_one, x], name="bend"), n], name="bent")
    curved = g.node("Where", [is_positive, squared, bent], name="curved")
    return g.node("Add", [curved, g.node("Mul", [x, beta], name="slope")], name="xielu")


def softcap(g: GraphBuilder, x: str, cap: float, name: str = "softcap") -> str:
    """`cap * tanh(x / cap)` of float32 x: what is small stays, and nothing exceeds the cap."""
    over = g.node("Mul", [x, g.constant(np.array(1 / cap, np.float32), "over")], name=f"{name}.in")
    bounded = g.node("Tanh", [over], name=f"{name}.tanh")
    return g.node("Mul", [bounded, g.constant(np.array(cap, np.float32), "cap")], name=name)


def above_deviations(g: GraphBuilder, x: str, count: float, dtype: int) -> str:
    """By how much x, of the type `dtype`, is more than so many deviations above its mean, or 0.

    Mean and deviation are of each row, and computed in float32.
    """
    axis = last_axis(g)
    is_wide = dtype == TensorProto.FLOAT
    wide = x if is_wide else cast(g, x, TensorProto.FLOAT, "cutoff.cast")
    mean = g.node("ReduceMean", [wide, axis], name="cutoff.mean", keepdims=1)
    apart = g.node("Sub", [wide, mean], name="cutoff.apart")
    square = g.node("Mul", [apart, apart], name="cutoff.square")
    variance = g.node("ReduceMean", [square, axis], name="cutoff.variance", keepdims=1)
    deviation = g.node("Sqrt", [variance], name="cutoff.deviation")
    least = g.node(
        "Mul", [deviation, g.constant(np.array(count, np.float32), "count")], name="cutoff.least"
    )
    above = g.node("Relu", [g.node("Sub", [apart, least], name="cutoff.above")], name="cutoff")
    return above if is_wide else cast(g, above, dtype, "cutoff.back")


def cast(g: GraphBuilder, x: str, dtype: int, name: str = "cast") -> str:
    """Convert the elements of `x` to an ONNX element type."""
    return g.node("Cast", [x], name=name, to=dtype)


def reshape(g: GraphBuilder, x: str, dims: Sequence[int], name: str = "reshape") -> str:
    """Give `x` another shape; 0 keeps the input's dimension, one -1 is inferred."""
    shape = g.constant(np.array(dims, np.int64), "shape")
    return g.node("Reshape", [x, shape], name=name)


def linear(g: GraphBuilder, x: str, weight: str, bias: str = "", name: str = "linear") -> str:
    """`x @ weight + bias`: x [..., K], weight [K, N], bias [N] or omitted."""
    y = g.node("MatMul", [x, weight], name=name)
    return g.node("Add", [y, bias], name=f"{name}.bias") if bias else y


def matmul_nbits(
    g: GraphBuilder,
    x: str,
    weight: str,
    scales: str,
    *,
    k: int,
    n: int,
    bits: int,
    block_size: int,
    zero_points: str = "",
    bias: str = "",
    accuracy_level: int | None = None,
    name: str = "linear",
) -> str:
    """`x @ dequantized(weight).T + bias` with block-wise quantized weights.

    Args:
        g: The builder.
        x: Activations [..., K].
        weight: uint8 [N, K / block_size, block_size * bits / 8]; 4-bit values have the even
            element in the low nibble.
        scales: [N, K / block_size], of x's dtype.
        k: Input features.
        n: Output features.
        bits: 4 or 8.
        block_size: Input features that share a scale.
        zero_points: uint8 [N, ceil(K / block_size * bits / 8)], packed as the weights are; omitted:
            2^(bits - 1) in every block.
        bias: [N] or omitted; a separate Add, which every execution provider has.
        accuracy_level: Least accuracy of x, 1 = float32 … 4 = int8 blocks; None leaves it out.
        name: Node name.
    """
    y = g.node(
        "MatMulNBits",
        [x, weight, scales, *([zero_points] if zero_points else [])],
        domain=MICROSOFT,
        name=name,
        K=k,
        N=n,
        bits=bits,
        block_size=block_size,
        accuracy_level=accuracy_level,
    )
    return g.node("Add", [y, bias], name=f"{name}.bias") if bias else y


def add_offsets(
    g: GraphBuilder,
    x: str,
    y: str,
    offsets: str,
    *,
    k: int,
    n: int,
    block_size: int,
    is_flat: bool,
    name: str = "linear",
) -> str:
    """`y` and what an offset of each block of the weights adds to it: `y + sums(x) @ offsets.T`.

    A weight is `(quant - 2^(bits - 1)) * scale + offset` then, as GGUF's Q4_1 and Q4_K have them.
    These are operators that every execution provider has.

    Args:
        g: The builder.
        x: Activations [..., K].
        y: Their product with weights that have no offsets, [..., N].
        offsets: [N, K / block_size], of x's dtype.
        k: Input features, whole blocks.
        n: Output features.
        block_size: Input features that share an offset.
        is_flat: Whether x is [rows, K].
        name: What the names of nodes begin with.
    """
    assert k % block_size == 0
    blocks = reshape(g, x, (-1, k // block_size, block_size), f"{name}.blocks")
    sums = g.node("ReduceSum", [blocks, last_axis(g)], name=f"{name}.sums", keepdims=0)
    rows = y if is_flat else reshape(g, y, (-1, n), f"{name}.rows")
    total = g.node("Gemm", [sums, offsets, rows], name=f"{name}.offsets", transB=1)
    if is_flat:
        return total
    shape = g.node("Shape", [y], name=f"{name}.shape")
    return g.node("Reshape", [total, shape], name=f"{name}.unflatten")


def last_axis(g: GraphBuilder) -> str:
    """The axes [-1], as an input."""
    return g.constant(np.array([-1], np.int64), "last_axis")


def gather_block_quantized(
    g: GraphBuilder,
    data: str,
    indices: str,
    scales: str,
    *,
    bits: int,
    block_size: int,
    name: str = "gather",
) -> str:
    """Rows of a block-wise quantized table, dequantized.

    Sharing one table with a tied `matmul_nbits` head: ORT wants `data` of the rank of `scales`
    (2-D) here and 3-D there, and with fp32 activations refuses either shape at the other place.
    Declare two initializers on the same bytes, and share the 2-D scales as they are:

        ref = writer.add_weight("lm_head.weight", q)           # uint8 [V, K/block, block*bits/8]
        scales = g.weight(writer.add_weight("lm_head.scales", s))              # [V, K/block]
        table = g.weight(ref.view("embed.weight", (V, K * bits // 8)))
        x = gather_block_quantized(g, table, INPUT_IDS, scales, …)
        logits = matmul_nbits(g, h, g.weight(ref), scales, …)

    Args:
        g: The builder.
        data: uint8 [V, K * bits / 8], zero point 2^(bits - 1).
        indices: Rows, int64 of any shape.
        scales: [V, K / block_size]; their dtype is that of the result.
        bits: 4 or 8.
        block_size: Elements of a row that share a scale.
        name: Node name.
    """
    return g.node(
        "GatherBlockQuantized",
        [data, indices, scales],
        domain=MICROSOFT,
        name=name,
        bits=bits,
        block_size=block_size,
        gather_axis=0,
        quantize_axis=1,
    )
