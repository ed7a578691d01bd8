"""Experts in MXFP4 in 8 bits: the same numbers, in graphs that others know, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.errors import ArtifactError
from onnxport.exporter import mxfp4
from onnxport.graphs import contract, fp4
from onnxport.graphs.experts import FP4, Swiglu
from onnxport.graphs.inspect import initializers
from onnxport.graphs.passes.int8_experts import int8_bytes, is_fp4, write_int8_experts
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.split_experts import split_experts
from onnxport.graphs.tensors import numpy_dtype
from tests.graphs.expert_models import (
    COUNT,
    HIDDEN,
    SIZE,
    TYPES,
    VARIANTS,
    Edit,
    inputs,
    layer,
    with_attribute,
)

NAMES = {kind: name for name, kind in TYPES.items()}


def test_every_number_is_exact() -> None:
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    scales = np.array([[1, 60, 100, 112, 119, 120, 126, 127, 128, 129, 140, 150, 180, 200, 251, 0]])
    scales = scales.astype(np.uint8)
    expected = mxfp4.decode(blocks, scales)
    numbers = fp4.int8_numbers(blocks).astype(np.float32) - 128
    halves = fp4.int8_scales("scales", scales, np.dtype(np.float32))
    np.testing.assert_array_equal((numbers * halves[..., None]).reshape(1, -1), expected)


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    blocks = np.random.default_rng(0).integers(0, 250, (3, 5, 16), np.uint8)
    expected = fp4.int8_numbers(blocks), fp4.int8_scales("s", blocks, np.dtype(np.float32))
    monkeypatch.setattr(fp4, "_CHUNK", chunk)
    np.testing.assert_array_equal(fp4.int8_numbers(blocks), expected[0])
    found = fp4.int8_scales("s", blocks, np.dtype(np.float32))
    np.testing.assert_array_equal(found, expected[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scales_in_each_type(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    scales = np.arange(104, 144, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    found = fp4.int8_scales("scales", scales, kind)
    assert found.dtype == kind
    np.testing.assert_array_equal(
        found.astype(np.float64), np.ldexp(0.5, np.arange(104, 144) - 127)
    )


def test_scales_beyond_float16() -> None:
    scales = np.array([[0, 103, 120]], np.uint8)
    found = fp4.int8_scales("scales", scales, np.dtype(np.float16))
    np.testing.assert_array_equal(found, [[0, 0, 2**-8]])
    with pytest.raises(ArtifactError, match=r"'down\.scales' .* up to 2\^17, half .* for float16;"):
        fp4.int8_scales("down.scales", np.array([3, 144, 9], np.uint8), np.dtype(np.float16))


def test_the_node(tmp_path: Path) -> None:
    made = layer(tmp_path, FP4, TYPES["float16"], "all", level=4)
    before = made.model.SerializeToString()
    result = write_int8_experts(made.model, made.read, "float32")
    assert made.model.SerializeToString() == before
    assert result.changes == {"layers of experts in MXFP4 written in 8 bits": 1}
    (node,) = [one for one in result.model.graph.node if one.op_type == "QMoE"]
    (old,) = [one for one in made.model.graph.node if one.op_type == "QMoE"]
    assert is_fp4(old)
    assert not is_fp4(node)
    names = ["gate_up.weight.int8", "gate_up.scales.float32", "gate_up.bias"]
    names += ["down.weight.int8", "down.scales.float32", "down.bias"]
    assert list(node.input) == ["x", "router", *names]
    given, kept = (
        {a.name: helper.get_attribute_value(a) for a in n.attribute} for n in (node, old)
    )
    kept.pop("quant_type")
    assert given == {**kept, "expert_weight_bits": 8}
    tensors = initializers(result.model)
    assert "global_scale" not in tensors
    versions = (made.model.ir_version, result.model.ir_version)
    assert versions == (contract.IR_VERSION_POWERS, contract.IR_VERSION)
    assert {one.data_type for one in tensors.values()} == {
        *(TensorProto.UINT8, TensorProto.FLOAT, TensorProto.FLOAT16)
    }
    for name, value in result.attached.items():
        assert list(value.shape) == list(tensors[name].dims)
        assert result.sources[name].name in name
    total = sum(value.nbytes for value in result.attached.values())
    assert total == int8_bytes(made.model, "float32")
    assert total == 3 * COUNT * SIZE * HIDDEN * (1 + 4 / 32)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("stored", sorted(TYPES))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_split_experts_compute_the_definition(
    tmp_path: Path, dtype: str, stored: str, variant: str
) -> None:
    made = layer(tmp_path, FP4, TYPES[stored], variant)
    widened = write_int8_experts(made.model, made.read, dtype)
    split = split_experts(widened.model, made=widened)
    assert split.changes == {"layers of experts split": 1}
    assert "MatMulNBits" in {node.op_type for node in split.model.graph.node}
    retyped = retype(split.model, made.read, dtype)
    x, logits = inputs(9)
    expected = made.expected(x, logits)
    assert np.ptp(expected) > 0.5
    if variant != "plain":
        plain = replace(made, swiglu=Swiglu(), biases=None).expected(x, logits)
        assert np.abs(expected - plain).max() > 0.1  # it tells
    found = made.run(retyped.model, x, logits, attached={**split.attached, **retyped.attached})
    np.testing.assert_allclose(found, expected, atol=1e-5 if dtype == "float32" else 3e-2)


def test_parts_are_views_and_know_their_sources(tmp_path: Path) -> None:
    made = layer(tmp_path, FP4, TYPES["float16"])
    widened = write_int8_experts(made.model, made.read, "float32")
    split = split_experts(widened.model, made=widened)
    declared = initializers(split.model)
    assert len(split.attached) == 2 * (1 + COUNT)
    assert split.attached.keys() <= declared.keys()
    for name, value in split.attached.items():
        assert any(np.shares_memory(value, whole) for whole in widened.attached.values())
        assert list(declared[name].dims) == list(value.shape)
        source = made.read(split.sources[name])
        if value.dtype == np.uint8:
            np.testing.assert_array_equal(fp4.int8_numbers(source), value)
        else:
            np.testing.assert_array_equal(fp4.int8_scales(name, source, value.dtype), value)


def test_some_may_stay(tmp_path: Path) -> None:
    made = layer(tmp_path, FP4, TYPES["float32"])
    result = write_int8_experts(made.model, made.read, "float32", lambda node: False)
    assert (result.changes, result.attached) == ({}, {})
    assert result.model == made.model
    assert int8_bytes(made.model, "float32", lambda node: False) == 0


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_others_stay(tmp_path: Path, bits: int | None) -> None:
    made = layer(tmp_path, bits, TYPES["float32"], "all")
    assert write_int8_experts(made.model, made.read, "float32").model == made.model


def _global_scale(model: onnx.ModelProto) -> None:
    (tensor,) = [one for one in model.graph.initializer if one.name == "global_scale"]
    values = np.ones(COUNT, np.float32)
    values[2] = 2
    tensor.CopyFrom(numpy_helper.from_array(values, "global_scale"))


def _without_global_scales(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "QMoE")
    del node.input[6:]


def _typed(name: str, kind: int) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        (tensor,) = [one for one in model.graph.initializer if one.name == name]
        tensor.data_type = kind

    return edit


EDITS: list[Any] = [
    with_attribute("expert_weight_bits", 8),
    with_attribute("block_size", 16),
    with_attribute("activation_type", "relu"),
    with_attribute("swiglu_fusion", 2),
    _global_scale,
    _without_global_scales,
    _typed("down.scales", TensorProto.UINT8),
    _typed("gate_up.weight", TensorProto.INT8),
]


@pytest.mark.parametrize("edit", EDITS)
def test_experts_of_another_kind_are_refused(tmp_path: Path, edit: Edit) -> None:
    made = layer(tmp_path, FP4, TYPES["float32"])
    edit(made.model)
    with pytest.raises(ArtifactError, match="QMoE 'experts', of experts in MXFP4, is not as"):
        write_int8_experts(made.model, made.read, "float32")


@pytest.mark.parametrize("kind", ["fp4", "nvfp4", "fp8"])
def test_only_integers_are_split(tmp_path: Path, kind: str) -> None:
    made = layer(tmp_path, FP4, TYPES["float32"])
    with_attribute("quant_type", kind)(made.model)
    with pytest.raises(ArtifactError, match="QMoE 'experts' is not as the exporter writes it"):
        split_experts(made.model)


def test_numpy_knows_the_type() -> None:
    assert numpy_dtype(TensorProto.FLOAT8E8M0) == ml_dtypes.float8_e8m0fnu
