"""Layers of experts with weights in floats: random cases, and what is right of them.

Serialized for float_experts_driver.cpp, a case is the index of the weights' type, K, inner, N, the
numbers of experts and of those that a row goes to, whether weights are normalized, whether there
are biases, and rows as int64; alpha, the offset and the limit; the input, logits, weights and
biases.
"""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.kernels import experts_cases, matmul_cases
from tests.kernels.matmul_cases import Floats

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
DEPTHS = (1, 7, 32, 100, 257)
INNERS = (1, 5, 33, 64, 100)
WIDTHS = (1, 3, 64, 100, 130)
ROWS = (1, 2, 5, 17, 64, 130)


@dataclass(frozen=True)
class FloatExpertsCase:
    """One call of onnxport.FloatExperts."""

    x: Floats  # [..., K]
    logits: Floats  # [rows, experts]
    # [experts, 2 * inner, K], a row of gate, then the same one of up; or of up alone.
    gate_up: NDArray[Any]
    down: NDArray[Any]  # [experts, N, inner]
    top_k: int
    normalize: bool = True
    gate_up_bias: Floats | None = None  # [experts, 2 * inner], or [experts, inner]
    down_bias: Floats | None = None  # [experts, N]
    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float = np.inf
    is_gelu: bool = False
    is_relu2: bool = False  # of up alone, see `without_gates`

    def replace(self, **changes: object) -> FloatExpertsCase:
        return replace(self, **changes)  # type: ignore[arg-type]

    def rows(self, which: slice) -> FloatExpertsCase:
        """The same experts for some of the rows."""
        return self.replace(x=self.x[which], logits=self.logits[which])

    def feeds(self) -> dict[str, Floats]:
        return {"x": self.x, "logits": self.logits}


def make_case(
    seed: int, dtype: Any, sizes: tuple[int, int, int], rows: int, count: tuple[int, int]
) -> FloatExpertsCase:
    """A layer of K, inner and N features, and experts of which a row goes to some."""
    rng = np.random.default_rng(seed)
    (depth, inner, width), (num_experts, top_k) = sizes, count

    def numbers(*shape: int) -> NDArray[Any]:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(dtype)

    return FloatExpertsCase(
        x=rng.standard_normal((rows, depth)).astype(np.float32),
        logits=(rng.standard_normal((rows, num_experts)) * 3).astype(np.float32),
        gate_up=numbers(num_experts, 2 * inner, depth),
        down=numbers(num_experts, width, inner),
        top_k=top_k,
    )


def random_case(seed: int) -> FloatExpertsCase:
    rng = np.random.default_rng(seed)
    sizes = (int(rng.choice(DEPTHS)), int(rng.choice(INNERS)), int(rng.choice(WIDTHS)))
    count = experts_cases.COUNTS[seed // 3 % len(experts_cases.COUNTS)]
    case = make_case(seed, DTYPES[seed % 3], sizes, int(rng.choice(ROWS)), count)
    if seed % 2:
        case = with_extras(case, seed)
    return case.replace(normalize=bool(rng.integers(2)))


def with_extras(case: FloatExpertsCase, seed: int = 1) -> FloatExpertsCase:
    """Biases, and GPT-OSS's activation with a nearer limit."""
    rng = np.random.default_rng(seed)
    biases = {
        name: rng.standard_normal(of.shape[:2]).astype(np.float32)
        for name, of in (("gate_up_bias", case.gate_up), ("down_bias", case.down))
    }
    return case.replace(**biases, alpha=1.702, up_offset=1.0, limit=0.7)


def without_gates(case: FloatExpertsCase, seed: int | None = None) -> FloatExpertsCase:
    """The same experts without the rows of up, and the square of a ReLU; with a seed, biases."""
    plain = case.replace(
        gate_up=np.ascontiguousarray(case.gate_up[:, : case.down.shape[2]]),
        **{"gate_up_bias": None, "down_bias": None, "alpha": 1.0, "up_offset": 0.0},
        **{"limit": np.inf, "is_gelu": False, "is_relu2": True},
    )
    if seed is None:
        return plain
    made = with_extras(plain, seed)
    return plain.replace(gate_up_bias=made.gate_up_bias, down_bias=made.down_bias)


def model(case: FloatExpertsCase, constant: bool = True, **attributes: float) -> bytes:
    """A model of the one node; `attributes` replace the node's."""
    num_experts, _, depth = case.gate_up.shape
    values = {
        "K": depth,
        "inner": case.down.shape[2],
        "N": case.down.shape[1],
        "num_experts": num_experts,
        "top_k": case.top_k,
        "normalize": int(case.normalize),
        **attributes,
    }
    for name, other in (("alpha", 1.0), ("up_offset", 0.0), ("limit", np.inf)):
        if getattr(case, name) != other:
            values.setdefault(name, getattr(case, name))
    for name in ("is_gelu", "is_relu2"):
        if getattr(case, name):
            values[name] = 1
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    given = {name: getattr(case, name) for name in names if getattr(case, name) is not None}
    places = [name if name in given else "" for name in names]
    node = helper.make_node(
        "FloatExperts", ["x", "logits", *places], ["y"], domain="onnxport", **values
    )
    tensors = [numpy_helper.from_array(array, name) for name, array in given.items()]
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


def run(library: Path, case: FloatExpertsCase, threads: int = 2) -> Floats:
    """[..., N]"""
    session = matmul_cases.session(library, model(case), threads)
    found: Floats = session.run(["y"], case.feeds())[0]
    return found


def check(case: FloatExpertsCase, found: Floats) -> None:
    """Checks the output against the definition in float64.

    The error of a sum of n products in floats is no more than n times 2^-24 of the sum of their
    magnitudes; errors that have random signs are far from it.
    """
    wanted, magnitude = _definition(case)
    assert (np.abs(found - wanted) <= 2e-6 * magnitude).all()


def _definition(case: FloatExpertsCase) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The output, [rows, N], and the sum of the magnitudes of what is added up in it."""
    weights, chosen = experts_cases.softmax_weights(case), experts_cases.route(case)[0]
    x = case.x.astype(np.float64)
    total = np.zeros((len(case.logits), case.down.shape[1]))
    magnitude = np.zeros_like(total)
    for number, (gate_up, down) in enumerate(
        zip(case.gate_up.astype(np.float64), case.down.astype(np.float64), strict=True)
    ):
        joined, size = x @ gate_up.T, np.abs(x) @ np.abs(gate_up.T)
        if case.gate_up_bias is not None:
            joined = joined + case.gate_up_bias[number]
            size = size + np.abs(case.gate_up_bias[number])
        activated, slack = _activated(case, joined, size)
        made = activated @ down.T
        spread = slack @ np.abs(down.T) + np.abs(activated) @ np.abs(down.T)
        if case.down_bias is not None:
            made = made + case.down_bias[number]
            spread = spread + np.abs(case.down_bias[number])
        part = np.where(chosen == number, weights, 0).sum(1, keepdims=True)
        total += part * made
        magnitude += part * spread
    return total, magnitude


def _activated(
    case: FloatExpertsCase, joined: NDArray[np.float64], size: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What there is between the products, and how far it moves with errors of their inputs.

    No slope of gate * sigmoid(alpha * gate) is above 1.1, and of a GELU none above 1.13; that of a
    ReLU's square is twice the ReLU.
    """
    if case.is_relu2:
        up = np.maximum(joined, 0)
        return np.square(up), 2 * up * size
    gate = np.minimum(joined[:, 0::2], case.limit)
    up = np.clip(joined[:, 1::2], -case.limit, case.limit) + case.up_offset
    steep = case.alpha * gate
    if case.is_gelu:
        steep = np.sqrt(8 / np.pi) * gate * (1 + 0.044715 * gate**2)
    curved = gate / (1 + np.exp(-steep))
    return curved * up, 1.1 * size[:, 0::2] * np.abs(up) + np.abs(curved) * size[:, 1::2]


def run_standalone(command: list[str], isa: str, cases: list[FloatExpertsCase]) -> list[Floats]:
    """Runs all cases in one process without ONNX Runtime; each output is [rows, N]."""
    data = struct.pack("q", len(cases)) + b"".join(_serialize(case) for case in cases)
    done = subprocess.run([*command, isa], input=data, capture_output=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    values = np.frombuffer(done.stdout, np.float32)
    sizes = [len(case.x) * case.down.shape[1] for case in cases]
    assert sum(sizes) == len(values)
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return [part.reshape(len(case.x), -1) for part, case in zip(parts, cases, strict=True)]


def _serialize(case: FloatExpertsCase) -> bytes:
    num_experts, _, depth = case.gate_up.shape
    sizes = (
        *(DTYPES.index(case.gate_up.dtype.type), depth, case.down.shape[2], case.down.shape[1]),
        *(num_experts, case.top_k, case.normalize, case.down_bias is not None, len(case.x)),
    )
    arrays = (case.x, case.logits, case.gate_up, case.down, case.gate_up_bias, case.down_bias)
    content = b"".join(array.tobytes() for array in arrays if array is not None)
    return struct.pack("9q3f", *sizes, case.alpha, case.up_offset, case.limit) + content
