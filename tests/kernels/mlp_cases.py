"""Gated feed-forward layers: random cases, as one operator and as the three that it replaces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs.inspect import set_input
from onnxport.graphs.passes.gated_mlp import MLP_OFFSETS, MLP_ZERO_POINTS
from onnxport.graphs.passes.int8_matmul import OFFSETS, ZERO_POINTS
from tests.kernels import matmul_cases
from tests.kernels.matmul_cases import BITS, BLOCK_SIZES, Floats, MatMulCase

# Less than a block, ragged ends of panels and of groups, several whole groups.
INNERS = (1, 7, 31, 32, 33, 64, 100, 128, 200, 256, 300, 777)
DEPTHS = (1, 5, 32, 100, 128, 257, 384)
WIDTHS = (1, 31, 33, 64, 300)
ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 127, 129, 257, 300)


@dataclass(frozen=True)
class MlpCase:
    """One call of onnxport.GatedMlp: two products; the first one's outputs are gate, then up."""

    gate_up: MatMulCase  # its x is the input
    down: MatMulCase  # its x is of no use
    is_gelu: bool = False  # the activation is GELU as tanh approximates it, else SiLU

    @property
    def x(self) -> Floats:
        """The input, [rows, K]."""
        return self.gate_up.x

    @property
    def inner(self) -> int:
        """Features between the two products."""
        return self.gate_up.n // 2


def random_case(seed: int) -> MlpCase:
    rng = np.random.default_rng(seed)
    formats = [(bits, size) for bits in BITS for size in BLOCK_SIZES]
    first, second = formats[seed % 10], formats[rng.integers(10)]
    k, inner, n = int(rng.choice(DEPTHS)), int(rng.choice(INNERS)), int(rng.choice(WIDTHS))
    rows = int(rng.choice(ROWS))
    has_zeros = (seed % 7 in (3, 5), seed % 5 in (1, 3))
    has_offsets = (seed % 7 in (2, 4), seed % 5 in (0, 4))
    return make_case(seed, first, second, (k, inner, n), rows, has_zeros, has_offsets)


def make_case(
    seed: int,
    first: tuple[int, int],
    second: tuple[int, int],
    sizes: tuple[int, int, int],
    rows: int,
    has_zeros: tuple[bool, bool] = (False, False),
    has_offsets: tuple[bool, bool] = (False, False),
) -> MlpCase:
    """A layer of K, inner and N features, whose products have these bits and block sizes.

    `has_zeros` says which of them have zero points, and `has_offsets` which have offsets.
    """
    k, inner, n = sizes
    gate_up = matmul_cases.make_case(seed, *first, k, 2 * inner, rows)
    down = matmul_cases.make_case(seed + 1, *second, inner, n, 1)
    if has_zeros[0]:
        gate_up = matmul_cases.with_zero_points(seed, gate_up)
    if has_zeros[1]:
        down = matmul_cases.with_zero_points(seed, down)
    if has_offsets[0]:
        gate_up = matmul_cases.with_offsets(seed, gate_up)
    if has_offsets[1]:
        down = matmul_cases.with_offsets(seed, down)
    # Gates of all sizes: an activation is no longer a product with zero or one.
    largest = np.abs(matmul_cases.expected(gate_up)).max(1, keepdims=True)
    x = gate_up.x / np.maximum(largest, 1e-30) * np.logspace(-2, 2, rows)[:, None]
    return MlpCase(gate_up.replace(x=x.astype(np.float32)), down)


def fused(case: MlpCase, constant: bool = True, **attributes: int) -> bytes:
    """A model of the one node; `attributes` replace the node's."""
    values = {
        "K": case.gate_up.k,
        "inner": case.inner,
        "N": case.down.n,
        "bits": case.gate_up.bits,
        "block_size": case.gate_up.block_size,
        "down_bits": case.down.bits,
        "down_block_size": case.down.block_size,
        **({"is_gelu": 1} if case.is_gelu else {}),
        **attributes,
    }
    inputs = ["x", "w1", "s1", "w2", "s2"]
    node = _node("GatedMlp", inputs, "y", **values)
    for of, place, name in zip(_products(case), MLP_ZERO_POINTS, ("z1", "z2"), strict=True):
        if of.zero_points is not None:
            set_input(node, place, name)
    for of, place, name in zip(_products(case), MLP_OFFSETS, ("o1", "o2"), strict=True):
        if of.offsets is not None:
            set_input(node, place, name)
    return _model(case, [node], constant)


def separate(case: MlpCase) -> bytes:
    """A model of the operators that it is made of."""
    nodes = [
        _product(case.gate_up, ["x", "w1", "s1"], "joined", ("z1", "o1")),
        _node("GatedGelu" if case.is_gelu else "GatedSilu", ["joined"], "activated"),
        _product(case.down, ["activated", "w2", "s2"], "y", ("z2", "o2")),
    ]
    return _model(case, nodes)


def _node(kind: str, inputs: list[str], output: str, **attributes: int) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], domain="onnxport", **attributes)


def _products(case: MlpCase) -> tuple[MatMulCase, MatMulCase]:
    return case.gate_up, case.down


def _product(
    of: MatMulCase, inputs: list[str], output: str, optional: tuple[str, str]
) -> onnx.NodeProto:
    sizes = {"K": of.k, "N": of.n, "bits": of.bits, "block_size": of.block_size}
    node = _node("MatMulNBits", inputs, output, **sizes)
    if of.zero_points is not None:
        set_input(node, ZERO_POINTS, optional[0])
    if of.offsets is not None:
        set_input(node, OFFSETS, optional[1])
    return node


def _model(case: MlpCase, nodes: list[onnx.NodeProto], constant: bool = True) -> bytes:
    arrays = (case.gate_up.quants, case.gate_up.scales, case.down.quants, case.down.scales)
    tensors = [
        numpy_helper.from_array(array, name)
        for array, name in zip(arrays, ("w1", "s1", "w2", "s2"), strict=True)
    ]
    tensors += [
        numpy_helper.from_array(of.stored_zero_points, name)
        for of, name in zip(_products(case), ("z1", "z2"), strict=True)
        if of.zero_points is not None
    ]
    tensors += [
        numpy_helper.from_array(of.offsets, name)
        for of, name in zip(_products(case), ("o1", "o2"), strict=True)
        if of.offsets is not None
    ]
    shape = [f"rows{i}" for i in range(case.x.ndim - 1)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*shape, "depth"])]
    if not constant:
        inputs += [
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            for tensor in tensors
        ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*shape, "width"])]
    graph = helper.make_graph(nodes, "mlp", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("onnxport", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def run(library: Path, case: MlpCase, serialized: bytes, threads: int = 2) -> Floats:
    """[..., N]"""
    session = matmul_cases.session(library, serialized, threads)
    found: Floats = session.run(["y"], {"x": case.x})[0]
    return found


def check(case: MlpCase, found: Floats) -> None:
    """Checks the output against float64, row by row."""
    wanted = expected(case)
    # A quant may round the other way where the float32 before it did, and few features are no mean.
    error = np.abs(found - wanted).max(1) / np.maximum(np.abs(wanted).max(1), 1e-30)
    assert error.max() < 0.1
    assert np.median(error) < 2e-3


def expected(case: MlpCase) -> Floats:
    """What the operator gives but for rounding in float32, [rows, N]; activations in int8."""
    joined = matmul_cases.expected(case.gate_up)
    gate, up = joined[:, : case.inner], joined[:, case.inner :]
    power = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3) if case.is_gelu else gate
    with np.errstate(over="ignore"):
        activated = gate / (1 + np.exp(-power)) * up
    rounded = case.down.replace(x=activated.astype(np.float32))
    return matmul_cases.expected(rounded).astype(np.float32)
