"""Feed-forward layers without a gate: passes for gates leave them, products are what they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from onnxport.exporter.activations import ACTIVATIONS, xielu
from onnxport.graphs import ops
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.passes.gated_gelu import fuse_gated_gelu
from onnxport.graphs.passes.gated_mlp import fuse_gated_mlp
from onnxport.graphs.passes.gated_silu import fuse_gated_silu
from onnxport.graphs.passes.input_norm import fuse_input_norm
from onnxport.graphs.passes.int8_matmul import use_int8_matmul
from onnxport.graphs.passes.product_bias import fuse_product_bias
from onnxport.graphs.passes.retype import retype
from tests.conformance.make import make_artifact

NUMBERS = (0.3, -0.7, 0.5, -1e-6)


def kinds(model: onnx.ModelProto) -> Counter[str]:
    return Counter(f"{node.domain}.{node.op_type}" for node in model.graph.node)


@pytest.mark.parametrize(
    ("case", "biases", "norms"),
    [("arcee-biases", 8, 4), ("starcoder2", 8, 0), ("nemotron", 4, 0), ("phi", 9, 0)],
)
def test_products_are_fused_with_what_is_there(
    tmp_path: Path, case: str, biases: int, norms: int
) -> None:
    """SiLU, GELU, squares, and GELU beside attention: nine products, each with its bias."""
    artifact = Artifact.read(make_artifact(tmp_path, case, "int4"))
    model = retype(artifact.load_graph("paged"), artifact.read_tensor).model
    for pass_ in (fuse_gated_silu, fuse_gated_gelu):
        assert not pass_(model).changes
    products = use_int8_matmul(model)
    assert products.changes == {"products with int8 activations": 9}
    assert not fuse_gated_mlp(products.model).changes
    normed = fuse_input_norm(products.model)
    assert sum(normed.changes.values()) == norms
    whole = fuse_product_bias(normed.model)
    assert whole.changes == {"biases added by their products": biases}
    assert kinds(whole.model)["onnxport.MatMulNBits"] == 9


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: np.ndarray = session.run(["y"], {"x": x})[0]
    return found


def activation(name: str) -> onnx.ModelProto:
    g = GraphBuilder("activation")
    g.input("x", TensorProto.FLOAT, ["rows", "size"])
    if name == "xielu":
        stored = (g.constant(np.array(one, np.float32), "number") for one in NUMBERS)
        y = ops.xielu(g, "x", ops.Xielu(*stored), TensorProto.FLOAT)
    else:
        y = {"gelu": ops.gelu, "gelu_tanh": ops.gelu_tanh, "relu2": ops.relu_squared}[name](g, "x")
    g.node("Identity", [y], outputs=["y"], name="last")
    g.output("y", TensorProto.FLOAT, ["rows", "size"])
    return g.build()


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "relu2", "xielu"])
def test_a_row_has_the_same_numbers_and_bits_beside_others(name: str) -> None:
    """Of a width that no vector divides, too; and those of the reference."""
    x = np.random.default_rng(0).standard_normal((37, 1003)).astype(np.float32) * 3
    model = activation(name)
    whole = run(model, x)
    apart = np.concatenate([run(model, row[None]) for row in x])
    np.testing.assert_array_equal(whole, apart)
    if name == "xielu":
        expected = xielu(x, *(np.array([one], np.float32) for one in NUMBERS))
    else:
        expected = ACTIVATIONS[name](x)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6)
