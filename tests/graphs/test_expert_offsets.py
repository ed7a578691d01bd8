"""Experts with offsets of blocks, and other bits of down: what both passes make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxport.errors import ArtifactError
from onnxport.graphs.experts import DOWN_BITS, OFFSETS, bits_of, offsets_of
from onnxport.graphs.inspect import initializers
from onnxport.graphs.passes.block_offsets import fuse_block_offsets
from onnxport.graphs.passes.gated_experts import (
    EXPERTS_OFFSETS,
    expert_offsets,
    use_gated_experts,
)
from onnxport.graphs.passes.int8_matmul import use_int8_matmul
from onnxport.graphs.passes.join_products import join_products
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.split_experts import split_experts
from onnxport.graphs.passes.stored_scales import use_stored_scales
from onnxport.providers.cpu.library import find_library
from tests.graphs.expert_models import TYPES, Edit, Layer, as_input, inputs, layer, with_attribute
from tests.graphs.test_gated_experts import KERNEL

VARIANTS = ("plain", "all", "relu2", "relu2-biased")
BITS = ((4, 4), (4, 8), (8, 4))
NAMES = ("gate_up.offsets", "down.offsets")


def made(
    folder: Path, bits: tuple[int, int] = (4, 4), dtype: str = "float16", **more: Any
) -> Layer:
    """A layer with offsets of both products."""
    given = {"down_bits": bits[1], **more}
    without = layer(folder, bits[0], TYPES[dtype], **given)
    found = layer(folder, bits[0], TYPES[dtype], offsets=True, **given)
    several = inputs(9)
    off = np.abs(found.expected(*several) - without.expected(*several)).max()
    assert off > 0.1  # they tell
    return found


def fused(one: Layer) -> onnx.ModelProto:
    """As the cpu provider lowers it."""
    kept = expert_offsets(one.model)
    model = use_gated_experts(retype(one.model, one.read, kept=kept).model).model
    return use_stored_scales(model, one.model).model


def test_the_node(tmp_path: Path) -> None:
    """Bits of down are told where they are others alone."""
    for first, second in BITS:
        (node,) = (n for n in made(tmp_path, (first, second)).model.graph.node if n.input[1:])
        assert (bits_of(node), offsets_of(node)) == ((first, second), NAMES)
        assert node.input[OFFSETS[0] :] == [*NAMES]
        assert any(one.name == DOWN_BITS for one in node.attribute) == (first != second)
    assert not expert_offsets(layer(tmp_path, 4, TYPES["float16"]).model)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", sorted(TYPES))
def test_split(tmp_path: Path, bits: tuple[int, int], variant: str, dtype: str) -> None:
    one = made(tmp_path, bits, dtype, variant=variant)
    split = split_experts(one.model)
    x, logits = inputs(9)
    expected = one.expected(x, logits)
    for step in (split, join_products(split.model, one.read)):
        found = one.run(step.model, x, logits, attached=step.attached)
        atol = (1e-6 if dtype == "float32" else 4e-3) * np.ptp(expected)
        np.testing.assert_allclose(found, expected, atol=atol)


@KERNEL
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_fused(tmp_path: Path, bits: tuple[int, int], variant: str) -> None:
    one = made(tmp_path, bits, variant=variant, level=4)
    model = fused(one)
    (node,) = [node for node in model.graph.node if node.op_type == "GatedExperts"]
    assert {a.name: a.i for a in node.attribute if a.name in ("bits", "down_bits")} == {
        "bits": bits[0],
        "down_bits": bits[1],
    }
    assert tuple(node.input[place] for place in EXPERTS_OFFSETS) == NAMES
    tensors = initializers(model)
    assert {tensors[name].data_type for name in NAMES} == {TensorProto.FLOAT16}
    x, logits = inputs(9)
    expected = one.expected(x, logits)
    found = one.run(model, x, logits, find_library())
    assert 0 < np.abs(found - expected).max() < 0.02 * np.ptp(expected)
    alone = [one.run(model, x[i : i + 1], logits[i : i + 1], find_library()) for i in range(9)]
    np.testing.assert_array_equal(np.concatenate(alone), found)


@KERNEL
def test_products_of_split_experts_add_them_themselves(tmp_path: Path) -> None:
    """Those of gate and up, which come right behind; down's are one product for all experts."""
    one = made(tmp_path, level=4)
    stored = split_experts(one.model).model
    model = use_int8_matmul(retype(stored, one.read).model).model
    result = fuse_block_offsets(model, stored)
    assert result.changes == {"offsets of blocks added by their products": 1}
    x, logits = inputs(9)
    expected = one.expected(x, logits)
    off = np.abs(one.run(result.model, x, logits, find_library()) - expected).max()
    assert off < 0.02 * np.ptp(expected)


def _as_integers(model: onnx.ModelProto) -> None:
    tensor = initializers(model)["down.offsets"]
    tensor.data_type = TensorProto.UINT8


def _in_float32(model: onnx.ModelProto) -> None:
    tensor = initializers(model)["down.offsets"]
    tensor.data_type = TensorProto.FLOAT


@pytest.mark.parametrize(
    "edit", [_as_integers, _in_float32, as_input("down.offsets"), with_attribute(DOWN_BITS, 2)]
)
def test_others_stay(tmp_path: Path, edit: Edit) -> None:
    """Such as zero points, which the schema has there."""
    one = made(tmp_path, level=4)
    model = retype(one.model, one.read, kept=expert_offsets(one.model)).model
    edit(model)
    result = use_gated_experts(model)
    assert result.changes == {}
    assert result.model == model


def test_zero_points_are_not_split(tmp_path: Path) -> None:
    model = made(tmp_path).model
    _as_integers(model)
    with pytest.raises(ArtifactError, match="split_experts: QMoE 'experts' is not as the exporter"):
        split_experts(model)


def test_onnx_runtime_refuses_them(tmp_path: Path) -> None:
    one = made(tmp_path)
    with pytest.raises(Exception, match=r"'tensor\(float16\)' of input parameter \(gate_up"):
        one.run(one.model, *inputs(2))
