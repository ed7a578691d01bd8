"""Layers of experts: random cases, and what operators of each expert make of their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs.inspect import set_input
from onnxport.graphs.passes.gated_experts import EXPERTS_OFFSETS, EXPERTS_ZERO_POINTS
from tests.kernels import matmul_cases, mlp_cases
from tests.kernels.matmul_cases import BITS, BLOCK_SIZES, Floats, MatMulCase
from tests.kernels.mlp_cases import MlpCase

INT4 = (4, 32)
Ints = NDArray[np.int64]

LANES = 8  # sums that the sum of all experts' powers is made of
DEPTHS = (1, 32, 100, 257)
INNERS = (1, 33, 64, 100, 200, 300)
WIDTHS = (1, 31, 64, 100)
ROWS = (1, 2, 5, 17, 64, 130, 200)
# How many experts there are, and how many of them a row goes to.
COUNTS = ((1, 1), (2, 1), (3, 3), (8, 2), (13, 5), (40, 8))


@dataclass(frozen=True)
class Extras:
    """What experts may have that GatedMlp has not."""

    gate_up_bias: Floats | None = (
        None  # [experts, 2 * inner], all of gate first, or [experts, inner]
    )
    down_bias: Floats | None = None  # [experts, N]
    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float = np.inf
    is_gelu: bool = False
    is_relu2: bool = False  # of experts whose gate_up is up alone, see `without_gates`

    def replace(self, **changes: object) -> Extras:
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def attributes(self) -> dict[str, float]:
        """Those of the operator."""
        found = {name: getattr(self, name) for name in ("alpha", "up_offset", "limit")}
        found = {name: value for name, value in found.items() if value != getattr(NONE, name)}
        flags = ("is_gelu", "is_relu2")
        return found | {name: 1 for name in flags if getattr(self, name)}

    def bounded(self, joined: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Gate, and what it is multiplied with."""
        gate, up = np.split(joined, 2, -1)
        limit, offset = joined.dtype.type(self.limit), joined.dtype.type(self.up_offset)
        return np.minimum(gate, limit), np.clip(up, -limit, limit) + offset


NONE = Extras()


class Routed(Protocol):
    """What decides which experts a row is given to."""

    @property
    def logits(self) -> Floats: ...
    @property
    def top_k(self) -> int: ...
    @property
    def normalize(self) -> bool: ...


@dataclass(frozen=True)
class ExpertsCase:
    """One call of onnxport.GatedExperts."""

    experts: list[MlpCase]  # the first one's x is the input
    logits: Floats  # [rows, experts]
    top_k: int
    normalize: bool
    half: bool = False  # the scales are float16
    extras: Extras = NONE

    @property
    def is_fp4(self) -> bool:
        return self.experts[0].gate_up.is_fp4

    @property
    def x(self) -> Floats:
        """The input, [..., K]."""
        return self.experts[0].x

    def replace(self, **changes: object) -> ExpertsCase:
        return replace(self, **changes)  # type: ignore[arg-type]

    def with_x(self, x: Floats, logits: Floats) -> ExpertsCase:
        """The same experts for other rows."""
        first = MlpCase(self.experts[0].gate_up.replace(x=x), self.experts[0].down)
        return self.replace(experts=[first, *self.experts[1:]], logits=logits)

    def feeds(self) -> dict[str, Floats]:
        return {"x": self.x, "logits": self.logits}


def random_case(seed: int) -> ExpertsCase:
    rng = np.random.default_rng(seed)
    formats = [(bits, size) for bits in BITS for size in BLOCK_SIZES]
    first, second = formats[seed % 10], formats[rng.integers(10)]
    sizes = (int(rng.choice(DEPTHS)), int(rng.choice(INNERS)), int(rng.choice(WIDTHS)))
    count = COUNTS[seed // 10 % len(COUNTS)]
    case = make_case(seed, (first, second), sizes, int(rng.choice(ROWS)), count)
    if rng.integers(2):  # many ties
        case = case.replace(logits=np.round(case.logits))
    case = case.replace(normalize=bool(rng.integers(2)), half=seed % 3 == 1)
    has_zeros = (seed % 7 in (3, 5), seed % 5 in (1, 3))
    return with_zeros(seed, case, has_zeros, has_offsets=(seed % 7 in (2, 4), seed % 5 in (0, 4)))


def with_zeros(
    seed: int,
    case: ExpertsCase,
    has_zeros: tuple[bool, bool] = (False, False),
    has_offsets: tuple[bool, bool] = (False, False),
) -> ExpertsCase:
    """The same experts, of which both products may have zero points or offsets."""

    def given(of: MatMulCase, seed: int, which: int) -> MatMulCase:
        if has_zeros[which]:
            return matmul_cases.with_zero_points(seed, of)
        return matmul_cases.with_offsets(seed, of) if has_offsets[which] else of

    experts = [
        MlpCase(given(one.gate_up, seed + 2 * i, 0), given(one.down, seed + 2 * i + 1, 1))
        for i, one in enumerate(case.experts)
    ]
    return case.replace(experts=experts)


def random_case_with_extras(seed: int) -> ExpertsCase:
    """Whose alpha is a power of two, so that a SiLU gives the bits of what there is."""
    case = random_case(seed)
    rng = np.random.default_rng(1000 + seed)
    extras = random_extras(seed, case)
    if seed % 4 == 0:
        extras = extras.replace(gate_up_bias=None)
    if seed % 4 == 1:
        extras = extras.replace(down_bias=None)
    return case.replace(
        extras=extras.replace(
            alpha=float(rng.choice([0.5, 1, 2])),
            up_offset=float(rng.choice([0, 1, -0.5])),
            limit=float(rng.choice([np.inf, 2, 0.25])),
        )
    )


def without_gates(case: ExpertsCase, seed: int | None = None) -> ExpertsCase:
    """The same experts without the rows of up, and the square of a ReLU; with a seed, biases."""
    experts = []
    for expert in case.experts:
        inner, of = expert.inner, expert.gate_up
        experts.append(MlpCase(_rows(of, lambda whole, inner=inner: whole[:inner]), expert.down))
    extras = NONE.replace(is_relu2=True)
    if seed is not None:
        rng = np.random.default_rng(seed)
        shapes = ((len(experts), experts[0].down.k), (len(experts), experts[0].down.n))
        biases = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        extras = extras.replace(gate_up_bias=biases[0], down_bias=biases[1])
    return case.replace(experts=experts, extras=extras)


def random_extras(seed: int, case: ExpertsCase) -> Extras:
    """Biases as large as what they are added to, and GPT-OSS's activation with a nearer limit."""
    rng = np.random.default_rng(seed)
    count, first = len(case.experts), case.experts[0]
    gate_up, down = (
        rng.standard_normal((count, size)).astype(np.float32)
        for size in (2 * first.inner, first.down.n)
    )
    return Extras(gate_up, down, alpha=1.702, up_offset=1.0, limit=2.0)


def case_with_extras(rows: int = 40) -> ExpertsCase:
    """Whose gates and ups are far from 0, with biases and GPT-OSS's activation."""
    case = make_case(8, (INT4, INT4), (384, 200, 64), rows, (4, 2))
    return case.replace(extras=random_extras(8, case))


def make_case(
    seed: int,
    formats: tuple[tuple[int, int], tuple[int, int]],
    sizes: tuple[int, int, int],
    rows: int,
    count: tuple[int, int],
) -> ExpertsCase:
    """A layer of K, inner and N features; both products have their bits and block size."""
    rng = np.random.default_rng(seed)
    num_experts, top_k = count
    # Steps of 3 keep what seeds say about scales; some experts' are larger.
    experts = [
        mlp_cases.make_case(seed + 3 * i, *formats, sizes, rows if i == 0 else 1)
        for i in range(num_experts)
    ]
    logits = rng.standard_normal((rows, num_experts)) * 3
    return ExpertsCase(experts, logits.astype(np.float32), top_k, normalize=True)


def model(case: ExpertsCase, constant: bool = True, **attributes: float | str) -> bytes:
    """A model of the one node; `attributes` replace the node's."""
    first = case.experts[0]
    values = {
        "K": first.gate_up.k,
        "inner": first.down.k,
        "N": first.down.n,
        "num_experts": len(case.experts),
        "top_k": case.top_k,
        "normalize": int(case.normalize),
        "bits": first.gate_up.bits,
        "block_size": first.gate_up.block_size,
        "down_bits": first.down.bits,
        "down_block_size": first.down.block_size,
        **case.extras.attributes,
        **({"quant_type": "fp4"} if case.is_fp4 else {}),
        **attributes,
    }
    names = ("gate_up", "gate_up_scales", "down", "down_scales")
    biases = {"gate_up_bias": case.extras.gate_up_bias, "down_bias": case.extras.down_bias}
    added = ["" if bias is None else name for name, bias in biases.items()]
    node = helper.make_node(
        "GatedExperts", ["x", "logits", *names, *added], ["y"], domain="onnxport", **values
    )
    products = joined(case)
    arrays = [array for of in products for array in (of.quants, of.stored_scales)]
    tensors = []
    for of, places in zip(
        products, zip(EXPERTS_ZERO_POINTS, EXPERTS_OFFSETS, strict=True), strict=True
    ):
        if of.zero_points is not None:
            set_input(node, places[0], f"zeros{places[0]}")
            tensors.append(numpy_helper.from_array(of.stored_zero_points, f"zeros{places[0]}"))
        if of.offsets is not None:
            set_input(node, places[1], f"offsets{places[1]}")
            tensors.append(numpy_helper.from_array(of.offsets, f"offsets{places[1]}"))
    for array, name in zip(arrays, names, strict=True):
        stored = array.astype(np.float16) if case.half and array.dtype == np.float32 else array
        by_expert = stored.reshape(len(case.experts), -1, *stored.shape[1:])
        tensors.append(numpy_helper.from_array(by_expert, name))
    for name, bias in biases.items():
        if bias is not None:
            is_whole = name == "down_bias" or case.extras.is_relu2
            rows = bias if is_whole else interleaved(bias.T).T
            tensors.append(numpy_helper.from_array(np.ascontiguousarray(rows), name))
    shape = [f"rows{i}" for i in range(case.x.ndim - 1)]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [*shape, "depth"]),
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", "experts"]),
    ]
    if not constant:
        inputs += [
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            for tensor in tensors
        ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*shape, "width"])]
    graph = helper.make_graph([node], "experts", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("onnxport", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def joined(case: ExpertsCase) -> tuple[MatMulCase, MatMulCase]:
    """The weights as they are stored, experts one after the other, with the input and with none."""
    gate_up, down = case.experts[0].gate_up, case.experts[0].down
    all_gate_up = [expert.gate_up for expert in case.experts]
    all_down = [expert.down for expert in case.experts]

    def stored(array: NDArray[Any]) -> NDArray[Any]:
        return array if case.extras.is_relu2 else interleaved(array)

    return (
        _below(gate_up, [_rows(of, stored) for of in all_gate_up]),
        _below(down.replace(x=down.x[:0]), all_down),
    )


_OF_ROWS = ("quants", "scales", "zero_points", "offsets")  # what a case has of each row


def _rows(of: MatMulCase, change: Callable[[NDArray[Any]], NDArray[Any]]) -> MatMulCase:
    """The same with other rows, or in another order."""
    found = {name: getattr(of, name) for name in _OF_ROWS}
    return of.replace(**{name: change(one) for name, one in found.items() if one is not None})


def _below(of: MatMulCase, every: list[MatMulCase]) -> MatMulCase:
    """The same with the rows of all, one below the other."""
    found = {name: [getattr(one, name) for one in every] for name in _OF_ROWS}
    return of.replace(
        **{name: np.concatenate(some) for name, some in found.items() if some[0] is not None}
    )


def interleaved(array: NDArray[Any]) -> NDArray[Any]:
    """All of gate, then all of up, as a row of gate, the same one of up, and so on."""
    return np.stack(np.split(array, 2), 1).reshape(array.shape)


def run(library: Path, case: ExpertsCase, threads: int = 2) -> Floats:
    """[..., N]"""
    session = matmul_cases.session(library, model(case), threads)
    found: Floats = session.run(["y"], case.feeds())[0]
    return found


def expected(library: Path, case: ExpertsCase) -> Floats:
    """The bits of the output, [rows, N]: GatedMlp of each expert, added up in float32.

    Or its products and a SiLU, where there is more to it; those of MXFP4 are NumPy's.
    """
    layers = layers_of(case)
    if case.extras is NONE and not case.is_fp4:
        return add_up(case, [mlp_cases.run(library, of, mlp_cases.fused(of)) for of in layers])
    numbers = np.unique(route(case)[0])
    made = [_apart(library, case.extras, *one) for one in zip(numbers, layers, strict=True)]
    return add_up(case, made)


def _apart(library: Path, extras: Extras, number: int, of: MlpCase) -> Floats:
    """An expert's output, [rows, N], with the bits that it has."""

    def product(case: MatMulCase, biases: Floats | None) -> Floats:
        if case.is_fp4:
            made = matmul_cases.product_bits(case)
            return made if biases is None else made + biases[number]
        serialized = matmul_cases.model(case)
        if biases is not None:
            serialized = matmul_cases.add_bias(serialized, biases[number])
        found: Floats = matmul_cases.session(library, serialized).run(["y"], {"x": case.x})[0]
        return found

    joined = product(of.gate_up, extras.gate_up_bias)
    if extras.is_relu2:
        return product(of.down.replace(x=np.square(np.maximum(joined, 0))), extras.down_bias)
    gate, up = extras.bounded(joined)
    alpha = np.float32(extras.alpha)
    assert np.frexp(alpha)[0] == 0.5, "no power of two"
    node = helper.make_node("GatedSilu", ["x"], ["y"], domain="onnxport")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "m"]) for name in "xy"]
    graph = helper.make_graph([node], "silu", ends[:1], ends[1:])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("onnxport", 1)]
    silu = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = matmul_cases.session(library, silu)
    steep = session.run(["y"], {"x": np.concatenate([alpha * gate, up], 1)})[0]
    return product(of.down.replace(x=steep / alpha), extras.down_bias)


def definition(case: ExpertsCase) -> NDArray[np.float64]:
    """What there is to compute, in float64 but for activations in int8, [rows, N]."""
    weights, chosen = softmax_weights(case), route(case)[0]
    total = np.zeros((len(case.logits), case.experts[0].down.n))
    for number, expert in enumerate(case.experts):
        joined = matmul_cases.expected(expert.gate_up.replace(x=case.x))
        if case.extras.gate_up_bias is not None:
            joined = joined + case.extras.gate_up_bias[number]
        activated = _activated(case.extras, joined)
        made = matmul_cases.expected(expert.down.replace(x=activated.astype(np.float32)))
        if case.extras.down_bias is not None:
            made = made + case.extras.down_bias[number]
        total += np.where(chosen == number, weights, 0).sum(1, keepdims=True) * made
    return total


def _activated(extras: Extras, joined: NDArray[np.float64]) -> NDArray[np.float64]:
    """What there is between the products."""
    if extras.is_relu2:
        return np.square(np.maximum(joined, 0))
    gate, up = extras.bounded(joined)
    with np.errstate(over="ignore"):
        steep = extras.alpha * gate
        if extras.is_gelu:
            steep = np.sqrt(8 / np.pi) * gate * (1 + 0.044715 * gate**2)
        activated: NDArray[np.float64] = gate / (1 + np.exp(-steep)) * up
    return activated


def check(case: ExpertsCase, found: Floats) -> None:
    """Checks the output against the definition, row by row."""
    wanted = definition(case)
    error = np.abs(found - wanted).max(1) / np.maximum(np.abs(wanted).max(1), 1e-30)
    # A quant may round the other way where the float32 before it did.
    assert error.max() < 0.1
    assert np.median(error) < 2e-3


def layers_of(case: ExpertsCase) -> list[MlpCase]:
    """The experts that have rows, with these."""
    chosen, _ = route(case)
    x = case.x.reshape(-1, case.x.shape[-1])
    layers = []
    for number in np.unique(chosen):
        rows, _ = np.nonzero(chosen == number)
        gate_up, down = case.experts[number].gate_up, case.experts[number].down
        if case.half:
            gate_up = gate_up.replace(scales=_halves(gate_up.scales))
            down = down.replace(scales=_halves(down.scales))
        layers.append(MlpCase(gate_up.replace(x=x[rows]), down))
    return layers


def _halves(scales: Floats) -> Floats:
    return scales.astype(np.float16).astype(np.float32)


def add_up(case: ExpertsCase, outputs: list[Floats]) -> Floats:
    """The output, [rows, N], of what the layers of `layers_of` give."""
    chosen, weights = route(case)
    parts = np.zeros((*chosen.shape, case.experts[0].down.n), np.float32)
    for number, output in zip(np.unique(chosen), outputs, strict=True):
        parts[chosen == number] = output
    with np.errstate(invalid="ignore"):
        total = weights[:, :1] * parts[:, 0]
        for slot in range(1, case.top_k):
            total = total + weights[:, slot, None] * parts[:, slot]
    return np.asarray(total, np.float32)


def route(case: Routed) -> tuple[Ints, Floats]:
    """Each row's experts and weights, [rows, top_k], with the bits that they have."""
    logits = case.logits
    usable = np.isfinite(logits.max(1)) & ~np.isnan(logits).any(1)
    safe = np.where(usable[:, None], logits, np.float32(0))
    chosen = np.argsort(-safe, 1, kind="stable")[:, : case.top_k]
    best = safe.max(1, keepdims=True)
    with np.errstate(over="ignore"):  # minus infinity is as good
        all_powers = power(safe - best)
    powers = np.take_along_axis(all_powers, chosen, 1)
    if case.normalize:
        total = np.zeros((len(logits), 1), np.float32)
        for slot in range(case.top_k):
            total += powers[:, slot : slot + 1]
    else:
        total = sum_in_lanes(all_powers)[:, None]
    return chosen, np.where(usable[:, None], powers / total, np.float32(np.nan))


def sum_in_lanes(values: Floats) -> Floats:
    """Sums of rows, in the operator's order."""
    sums = np.zeros((len(values), LANES), np.float32)
    for i in range(values.shape[1]):
        sums[:, i % LANES] += values[:, i]
    for width in (4, 2, 1):
        sums[:, :width] += sums[:, width : 2 * width]
    return sums[:, 0]


def power(x: Floats) -> Floats:
    """exp(x) of x <= 0, step by step as the operator has it."""
    f = np.float32
    bounded = np.where(x > f(-87), x, f(-87))
    exponent = (bounded * f(1.44269504) + f(12582912)) - f(12582912)
    rest = (bounded - exponent * f(0.693359375)) - exponent * f(-2.12194440e-4)
    y = np.full_like(rest, f(1.9875691500e-4))
    coefficients = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2)
    for coefficient in (*coefficients, 1.6666665459e-1, 5.0000001201e-1):
        y = y * rest + f(coefficient)
    y = y * (rest * rest) + rest + f(1)
    return np.where(x > f(-87), np.ldexp(y, exponent.astype(np.int32)), f(0))


def softmax_weights(case: Routed) -> NDArray[np.float64]:
    """The weights in float64, [rows, top_k]."""
    logits = case.logits.astype(np.float64)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    largest = -np.sort(-powers, 1)[:, : case.top_k]
    total = largest if case.normalize else powers
    return np.asarray(largest / total.sum(1, keepdims=True))
