"""Names, constants and weights of GraphBuilder; the op builders run in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxport.graphs import attention_ops, ops
from onnxport.graphs import contract as c
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.tensors import TensorRef
from tests.graphs.paged_models import start

FLOAT = TensorProto.FLOAT
REF = TensorRef("w", FLOAT, (2, 8), 4096, 64)


def test_names_are_scoped_and_unique() -> None:
    g = GraphBuilder("names")
    x = g.input("x", FLOAT, ["n"])
    with g.scope("layers.0"):
        first = g.node("Abs", [x])
        second = g.node("Abs", [first])
        with g.scope("mlp"):
            named = g.node("Abs", [second], name="act")
        with g.scope("shared", root=True):
            root = g.node("Abs", [named])
    assert first == "layers.0.Abs.out"
    assert second == "layers.0.Abs_2.out"
    assert named == "layers.0.mlp.act.out"
    assert root == "shared.Abs.out"
    assert g.node("Split", [x], outputs=2) == ("Split.out0", "Split.out1")
    assert g.node("Op", [x], outputs=[".a", "", "mine"]) == ("Op.a", "", "mine")
    nodes = g.take_nodes()
    assert len({node.name for node in nodes}) == len(nodes) == 6
    assert g.take_nodes() == []


def test_a_value_has_one_producer() -> None:
    g = GraphBuilder("names")
    x = g.input("x", FLOAT, ["n"])
    g.node("Abs", [x], outputs=["y"])
    with pytest.raises(AssertionError, match="'y' is used twice"):
        g.node("Abs", [x], outputs=["y"])
    with pytest.raises(AssertionError, match="'x' is used twice"):
        g.input("x", FLOAT, ["n"])


def test_reserved_names_are_not_made() -> None:
    g = GraphBuilder("names")
    g.reserve(["Abs", "Abs_2"])
    assert g.node("Abs", ["x"]) == "Abs_3.out"
    assert g.constant(np.array(1.0, np.float32), "Abs") == "Abs_3"


def test_constants_are_stored_once_by_type_shape_and_value() -> None:
    g = GraphBuilder("constants")
    one = g.constant(np.array(1, np.int64), "one")
    assert g.constant(np.array(1, np.int64), "other") == one
    others = [np.array([1], np.int64), np.array(1, np.int32), np.array(2, np.int64)]
    assert len({one, *(g.constant(value, "one") for value in others)}) == 4
    scalar = g.take_initializers()[0]
    assert list(scalar.dims) == []


def test_weights_are_declared_once_and_must_agree() -> None:
    g = GraphBuilder("weights")
    assert g.weight(REF) == g.weight(REF) == "w"
    with pytest.raises(AssertionError, match="weight w declared"):
        g.weight(TensorRef("w", FLOAT, (2, 8), 0, 64))
    g.weight(REF.view("v", (16,)))
    first, second = g.build().graph.initializer
    assert [(e.key, e.value) for e in first.external_data] == [
        ("location", "model.onnx.data"),
        ("offset", "4096"),
        ("length", "64"),
    ]
    assert list(first.external_data) == list(second.external_data)
    with pytest.raises(AssertionError):
        REF.view("wrong", (3,))


def test_the_model_declares_the_contract() -> None:
    model = GraphBuilder("empty").build()
    assert model.ir_version == c.IR_VERSION
    assert {o.domain: o.version for o in model.opset_import} == {"": 21, c.MICROSOFT: 1}
    assert model.producer_name == "onnxport"


def test_norms_match_numpy() -> None:
    r = np.random.default_rng(0)
    g = GraphBuilder("norms")
    x, skip = (g.input(name, FLOAT, ["n", 8]) for name in ("x", "skip"))
    weight = g.constant(r.standard_normal(8).astype(np.float32), "weight")
    normed, total = ops.skip_rms_norm(g, x, skip, weight, 1e-5)
    again = ops.rms_norm(g, total, weight, 1e-5)
    for name in (normed, total, again):
        g.output(name, FLOAT, ["n", 8])
    feed = {name: r.standard_normal((3, 8)).astype(np.float32) for name in ("x", "skip")}
    found = start(g.build()).run([normed, total, again], feed)
    expected = feed["x"] + feed["skip"]
    gain = onnx.numpy_helper.to_array(g.build().graph.initializer[0])
    rms = expected / np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-5) * gain
    for value, wanted in zip(found, (rms, expected, rms), strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bias", [True, False])
def test_a_quantized_table_serves_embedding_and_head(bits: int, bias: bool) -> None:
    """The two shapes of one tied table give the same numbers."""
    r = np.random.default_rng(0)
    n, k, block = 48, 64, 32
    data = r.integers(0, 256, (n, k // block, block * bits // 8), dtype=np.uint8)
    scales = r.uniform(0.01, 0.1, (n, k // block)).astype(np.float32)
    g = GraphBuilder("tied")
    x, ids = g.input("x", FLOAT, ["n", k]), g.input("ids", TensorProto.INT64, ["m"])
    s = g.constant(scales, "scales")
    options = {"bits": bits, "block_size": block}
    table = g.constant(data.reshape(n, -1), "table")
    rows = ops.gather_block_quantized(g, table, ids, s, **options)
    offset = r.standard_normal(n).astype(np.float32)
    y = ops.matmul_nbits(
        g,
        x,
        g.constant(data, "weight"),
        s,
        k=k,
        n=n,
        bias=g.constant(offset, "bias") if bias else "",
        **options,
    )
    g.output(rows, FLOAT, ["m", k])
    g.output(y, FLOAT, ["n", n])
    feed = {"x": r.standard_normal((3, k)).astype(np.float32), "ids": np.array([5, 0, 47])}
    found = start(g.build()).run([rows, y], feed)
    values = np.stack([data & 15, data >> 4], -1) if bits == 4 else data
    dense = (values.reshape(n, -1, block) - 2.0 ** (bits - 1)) * scales[..., None]
    dense = dense.reshape(n, k)
    np.testing.assert_allclose(found[0], dense[feed["ids"]], atol=1e-5)
    expected = feed["x"] @ dense.T + (offset if bias else 0)
    np.testing.assert_allclose(found[1], expected, atol=2e-4, rtol=1e-4)


def test_gqa_lengths_come_from_the_mask() -> None:
    g = GraphBuilder("lengths")
    mask = g.input(c.ATTENTION_MASK, TensorProto.INT64, [c.BATCH, "total"])
    less_one, total = attention_ops.gqa_sequence_lengths(g, mask)
    g.output(less_one, TensorProto.INT32, [c.BATCH])
    g.output(total, TensorProto.INT32, [])
    feed = {c.ATTENTION_MASK: np.array([[1, 1, 1, 1], [1, 1, 0, 0]])}
    found = start(g.build()).run([less_one, total], feed)
    np.testing.assert_array_equal(found[0], [3, 1])
    assert found[1] == 4
    assert found[1].shape == ()
