"""Flattening PagedAttention: its inputs, what stays, and what is refused.

That it computes the same is shown with OpenVINO, in tests/providers/test_openvino.py: ONNX Runtime
cannot run the operator.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from onnxport.errors import ArtifactError
from onnxport.graphs import contract as c
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import attribute_int
from onnxport.graphs.passes import flat_paged
from onnxport.graphs.passes.flat_paged import flatten_paged, has_sinks
from tests.graphs.paged_models import op_types


def paged(dtype: int = TensorProto.FLOAT, rotary: int = 8, **attributes: object) -> onnx.ModelProto:
    """Two layers as the exporter makes them: packed, rotated, with a cache of their own."""
    g = GraphBuilder("test")
    heads, kv_heads, size = 4, 2, 8
    g.input("qkv", dtype, [c.NUM_TOKENS, (heads + 2 * kv_heads) * size])
    ints = {
        c.CUMULATIVE_SEQUENCE_LENGTHS: [c.BATCH_PLUS_ONE],
        c.PAST_SEQUENCE_LENGTHS: [c.BATCH],
        c.BLOCK_TABLE: [c.BATCH, c.MAX_NUM_BLOCKS],
        c.ATTENTION_METADATA: [3],
    }
    for name, dims in ints.items():
        g.input(name, TensorProto.INT32, dims)
    tables = [
        g.constant(np.full((64, rotary // 2), value, np.float32), name)
        for value, name in enumerate(("cos", "sin"))
    ]
    shape = [c.NUM_BLOCKS, c.BLOCK_SIZE, kv_heads, size]
    for layer in range(2):
        caches = [g.input(name(layer), dtype, shape) for name in (c.past_key, c.past_value)]
        presents = [g.output(n(layer), dtype, shape) for n in (c.present_key, c.present_value)]
        out = g.output(f"out{layer}", dtype, [c.NUM_TOKENS, heads * size])
        g.node(
            "PagedAttention",
            ["qkv", "", "", *caches, c.CUMULATIVE_SEQUENCE_LENGTHS, c.PAST_SEQUENCE_LENGTHS,
             c.BLOCK_TABLE, *tables, "", "", "", "", "", "", c.ATTENTION_METADATA],
            outputs=[out, *presents],
            domain=c.MICROSOFT,
            name=f"layers.{layer}.attention",
            **{"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1, **attributes},
        )  # fmt: skip
    return g.build()


def test_the_block_table_gives_way_to_flat_lists() -> None:
    before = paged(local_window_size=5)
    untouched = before.SerializeToString()
    result = flatten_paged(before)
    assert before.SerializeToString() == untouched
    assert result.changes == {"PagedAttention flattened": 2}
    inputs = {info.name for info in result.model.graph.input}
    assert not {c.BLOCK_TABLE, c.ATTENTION_METADATA} & inputs
    assert {
        flat_paged.POSITIONS,
        flat_paged.BLOCK_INDICES,
        flat_paged.BLOCK_INDICES_BEGINS,
        flat_paged.MAX_CONTEXT_LEN,
        c.past_key(0),
        c.past_value(1),
    } <= inputs
    assert [info.name for info in result.model.graph.output] == ["out0", "out1"]
    kinds = op_types(result.model)
    assert kinds.count(flat_paged.FLAT_PAGED_ATTENTION) == 2
    assert kinds.count("Gather") == 2  # rows of cos and sin, once for both layers
    nodes = [n for n in result.model.graph.node if n.op_type == flat_paged.FLAT_PAGED_ATTENTION]
    assert [attribute_int(node, "local_window_size", -1) for node in nodes] == [5, 5]
    assert {node.domain for node in result.model.graph.node} == {"", "onnxport"}


def test_channels_that_do_not_rotate_are_carried_past() -> None:
    whole, partial = (op_types(flatten_paged(paged(rotary=n)).model) for n in (8, 4))
    assert partial.count("Split") == whole.count("Split") + 4
    assert partial.count("Concat") == whole.count("Concat") + 4


def test_without_rotation_no_table_is_read() -> None:
    kinds = op_types(flatten_paged(paged(do_rotary=0)).model)
    assert "Gather" not in kinds
    assert kinds.count("Split") == 2


def test_sinks_are_one_more_input() -> None:
    model = paged()
    assert not has_sinks(flatten_paged(model).model)
    sinks = numpy_helper.from_array(np.arange(4, dtype=np.float32), "sinks")
    model.graph.initializer.append(sinks)
    for node in model.graph.node:
        node.input[11] = sinks.name
    found = flatten_paged(model).model
    assert has_sinks(found)
    inputs = [n.input for n in found.graph.node if n.op_type == flat_paged.FLAT_PAGED_ATTENTION]
    assert [len(names) for names in inputs] == [flat_paged.SINKS + 1] * 2
    makers = {node.output[0]: node for node in found.graph.node}
    assert {makers[names[flat_paged.SINKS]].input[0] for names in inputs} == {sinks.name}


def test_a_graph_without_paged_attention_is_left_alone() -> None:
    model = paged()
    del model.graph.node[:]
    result = flatten_paged(model)
    assert result.changes == {}
    assert result.model == model


def test_the_same_operator_of_another_domain_is_left_alone() -> None:
    model = paged()
    for node in model.graph.node:
        node.domain = "elsewhere"
    assert flatten_paged(model).model == model


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (paged(softcap=30.0), "softcap"),
        (paged(rotary_offset=4), "a RoPE offset"),
        (paged(is_causal=0), "not causal"),
        (paged(dtype=TensorProto.FLOAT16), "not float32"),
    ],
)
def test_what_is_not_covered_is_refused(model: onnx.ModelProto, found: str) -> None:
    with pytest.raises(ArtifactError, match=f"uses .*{found}"):
        flatten_paged(model)


def test_everything_that_is_wrong_is_named() -> None:
    with pytest.raises(ArtifactError, match="a RoPE offset and softcap"):
        flatten_paged(paged(softcap=30.0, rotary_offset=4))


def test_a_cos_table_that_is_no_initializer_is_refused() -> None:
    model = paged()
    for node in model.graph.node:
        node.input[8] = "qkv"
    with pytest.raises(ArtifactError, match="must be an initializer"):
        flatten_paged(model)
