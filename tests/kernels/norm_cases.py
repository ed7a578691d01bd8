"""Norms that our operators compute on their input: random ones, and what they should give."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs.inspect import set_input
from tests.kernels import matmul_cases
from tests.kernels.matmul_cases import Floats, MatMulCase

EPSILONS = (0.0, 1e-12, 1e-6, 1e-5, 0.1)


@dataclass(frozen=True)
class Norm:
    """What an operator normalizes its input x with."""

    skip: Floats  # shaped as x, [..., K]
    gamma: Floats  # [K]
    epsilon: float

    def part(self, rows: slice | np.ndarray) -> Norm:
        """That of some rows."""
        return Norm(self.skip[rows], self.gamma, self.epsilon)


def random_norm(seed: int, x: Floats) -> Norm:
    """One whose skip is about as large as each row of x."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-1, 1, x.shape[:-1])[..., None] * np.abs(x).mean(-1, keepdims=True)
    skip = (rng.standard_normal(x.shape) * sizes).astype(np.float32)
    gamma = (1 + rng.standard_normal(x.shape[-1])).astype(np.float32)
    return Norm(skip, gamma, float(rng.choice(EPSILONS)))


def normalized(x: Floats, norm: Norm) -> Floats:
    """x + skip in float32, the rest in float64."""
    total = (x + norm.skip).astype(np.float64)
    scale = np.sqrt(np.mean(total**2, -1, keepdims=True) + np.float32(norm.epsilon))
    found: Floats = (total / scale * norm.gamma).astype(np.float32)
    return found


def add_norm(
    serialized: bytes, norm: Norm, without: Collection[str] = (), more: Collection[str] = ()
) -> bytes:
    """A model whose first node gets the norm, `without` some of what one consists of.

    `more` are further outputs.
    """
    of = onnx.load_from_string(serialized)
    node, shape = of.graph.node[0], of.graph.input[0].type.tensor_type.shape
    first = 5 if node.op_type == "GatedMlp" else 3
    for place, name in enumerate(("skip", "gamma"), first):
        set_input(node, place, "" if name in without else name)
    skip = helper.make_tensor_value_info("skip", TensorProto.FLOAT, None)
    skip.type.tensor_type.shape.CopyFrom(shape)
    of.graph.input.append(skip)
    of.graph.initializer.append(numpy_helper.from_array(norm.gamma, "gamma"))
    if "epsilon" not in without:
        node.attribute.append(helper.make_attribute("epsilon", norm.epsilon))
    for name in [] if "residual" in without else ["residual", *more]:
        node.output.append(name)
        of.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return of.SerializeToString()


def run(library: Path, serialized: bytes, x: Floats, norm: Norm, threads: int = 2) -> list[Floats]:
    """The output and the residual of a model that has the norm."""
    session = matmul_cases.session(library, serialized, threads)
    return list(session.run(["y", "residual"], {"x": x, "skip": norm.skip}))


def check_product(case: MatMulCase, norm: Norm, found: Floats) -> None:
    """Checks a product with normalized activations, [rows, N]."""
    case = case.replace(x=normalized(case.x, norm))
    magnitude = matmul_cases.magnitudes(case)
    exact = matmul_cases.float_product(case)
    bound = matmul_cases.rounding_bound(case) + 3e-6 * magnitude + 1e-30
    assert np.all(np.abs(found - exact) <= bound)
    # A quant may round the other way where the float32 before it did; few do.
    wanted = matmul_cases.expected(case)
    error = np.linalg.norm(found - wanted, axis=1) / np.maximum(
        np.linalg.norm(wanted, axis=1), 1e-30
    )
    assert np.median(error) < 1e-5
