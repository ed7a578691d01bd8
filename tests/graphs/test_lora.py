"""The passes that let adapters add to a decoder's products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxport.errors import ArtifactError
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import attribute_int, consumers, producers
from onnxport.graphs.lora import (
    KINDS,
    PROJECTIONS,
    RANKS,
    SCALES,
    TOKEN_SLOTS,
    WEIGHTS,
    LoraProduct,
    SlotDtype,
    owners_name,
    projection_shapes,
    slot_layout,
)
from onnxport.graphs.passes.gated_silu import DOMAIN, fuse_gated_silu
from onnxport.graphs.passes.int8_matmul import use_int8_matmul
from onnxport.graphs.passes.lora import add_lora, add_lora_operator, lora_products
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.split_matmul import split_matmul
from tests.conformance.make import make_artifact
from tests.kernels.integer_adapters import room_of

Edit = Callable[[onnx.ModelProto], None]
WHOLE = ("qkv", "o", "gate_up", "down")


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return Artifact.read(make_artifact(tmp_path_factory.mktemp("lora"), "qwen2", "int4"))


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return Artifact.read(make_artifact(tmp_path_factory.mktemp("lora"), "llama", "fp32"))


def lowered(artifact: Artifact) -> onnx.ModelProto:
    return retype(artifact.load_graph("paged"), artifact.read_tensor).model


def inputs(model: onnx.ModelProto) -> dict[str, list[int | str]]:
    return {
        info.name: [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]
        for info in model.graph.input
    }


def test_every_product_gets_three_nodes(fp32: Artifact) -> None:
    model, spec = lowered(fp32), fp32.manifest.model
    untouched = model.SerializeToString()
    result = add_lora(model, spec)
    assert model.SerializeToString() == untouched
    assert result.changes == {"products with LoRA": 4 * spec.num_layers}
    found, made, readers = inputs(result.model), producers(result.model), consumers(result.model)
    shapes = projection_shapes(spec, 0)
    for kind in WHOLE:
        rows = f"lora.{kind}.rows"
        assert found[owners_name(kind)] == [rows]
        for layer in range(spec.num_layers):
            product = LoraProduct(layer, kind)
            outputs = sum(shapes[name][0] for name in KINDS[kind])
            assert found[product.a] == [rows, shapes[KINDS[kind][0]][1]]
            assert found[product.b] == [rows, outputs]
            last = readers[product.b][0][0]
            own, base = made[last.input[0]], made[last.input[2]]
            assert (last.op_type, own.op_type, base.op_type) == ("Gemm", "Where", "MatMul")
            low = made[own.input[1]]
            assert (low.op_type, attribute_int(low, "transB", 0)) == ("Gemm", 1)
            assert low.input[0] == base.input[0]
            assert len(readers[base.output[0]]) == 1
    assert found[TOKEN_SLOTS] == [contract.NUM_TOKENS]


def test_only_the_rows_that_need_logits_reach_the_end_of_the_last_layer(fp32: Artifact) -> None:
    spec = fp32.manifest.model
    model = add_lora(lowered(fp32), spec).model
    made, readers = producers(model), consumers(model)
    for layer in range(spec.num_layers):
        for kind in WHOLE:
            own = made[readers[LoraProduct(layer, kind).b][0][0].input[0]]
            equal = made[own.input[0]]
            slots = made[equal.input[0]].input[0]
            selected = layer == spec.num_layers - 1 and kind != "qkv"
            assert (slots != TOKEN_SLOTS) == selected, (layer, kind)
            if selected:
                assert list(made[slots].input) == [TOKEN_SLOTS, contract.LOGITS_INDICES]


def test_parts_of_a_split_product_are_products(int4: Artifact) -> None:
    model = retype(split_matmul(int4.load_graph("paged")).model, int4.read_tensor).model
    spec = int4.manifest.model
    result = add_lora(model, spec)
    found = inputs(result.model)
    assert result.changes == {"products with LoRA": 5 * spec.num_layers}
    assert [product.kind for product in lora_products(result.model, spec)[:5]] == [
        *("qkv", "o", "gate", "up", "down")
    ]
    assert found["lora.layers.0.up.b"] == ["lora.up.rows", spec.intermediate_size]


def test_other_passes_still_find_what_they_fuse(int4: Artifact) -> None:
    model, spec = lowered(int4), int4.manifest.model
    plain = use_int8_matmul(fuse_gated_silu(model).model).changes
    for result in (add_lora(model, spec), add_lora_operator(model, spec, 8)):
        fused = fuse_gated_silu(result.model)
        assert fused.changes == {"gated SiLUs fused": spec.num_layers}
        after = use_int8_matmul(fused.model)
        assert after.changes == plain
        domains = [opset.domain for opset in after.model.opset_import]
        assert domains.count(DOMAIN) == 1
        assert len(lora_products(after.model, spec)) == 4 * spec.num_layers


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_operator_knows_where_its_product_lies(int4: Artifact, dtype: SlotDtype) -> None:
    model, spec = lowered(int4), int4.manifest.model
    result = add_lora_operator(model, spec, 8, dtype)
    products = lora_products(model, spec)
    layout, numbers = slot_layout(products, spec, 8, dtype)
    assert {product.bits for product in products} == {4}
    found = inputs(result.model)
    assert found[WEIGHTS] == ["lora.slots", numbers]
    assert found[RANKS] == ["lora.ranks_rows", spec.num_layers, len(PROJECTIONS)]
    kinds = {i.name: i.type.tensor_type.elem_type for i in result.model.graph.input}
    assert (kinds[WEIGHTS], kinds[SCALES]) == (TensorProto.INT8, TensorProto.FLOAT)
    assert found[SCALES] == [*found[RANKS], 8]
    nodes = {node.name: node for node in result.model.graph.node if node.op_type == "AddLora"}
    assert len(nodes) == len(products)
    taken = np.zeros(numbers, np.int8)
    for product in products:
        node = nodes[f"{product.name}.lora"]
        assert list(node.input)[3:] == [RANKS, WEIGHTS, SCALES]
        columns = [attribute_int(node, f"columns{part}", -1) for part in range(3)]
        assert columns == [*product.out_features(spec), 0, 0][:3]
        first = product.layer * 7 + PROJECTIONS.index(KINDS[product.kind][0])
        assert attribute_int(node, "ranks", -1) == first
        assert attribute_int(node, "offset", -1) == layout[product]
        assert attribute_int(node, "bits", -1) == product.bits
        assert attribute_int(node, "block_size", -1) == product.block_size
        assert attribute_int(node, "adapter_bits", -1) == int(dtype.removeprefix("int"))
        parts = product.out_features(spec)
        depth, format_of = product.in_features(spec), (product.bits, product.block_size)
        room = room_of(depth, parts, 8, *format_of, dtype)
        taken[layout[product] : layout[product] + room] += 1
    assert (taken == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_floats_have_no_scales(int4: Artifact, dtype: SlotDtype) -> None:
    model = add_lora_operator(lowered(int4), int4.manifest.model, 8, dtype).model
    kinds = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    assert SCALES not in kinds
    assert kinds[WEIGHTS] == getattr(TensorProto, dtype.upper().replace("32", ""))
    adding = [node for node in model.graph.node if node.op_type == "AddLora"]
    assert {tuple(node.input)[3:] for node in adding} == {(RANKS, WEIGHTS)}


def other_name(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.input[:] = ["weight" if n == "layers.1.o.weight" else n for n in node.input]
    next(t for t in model.graph.initializer if t.name == "layers.1.o.weight").name = "weight"


def other_shape(model: onnx.ModelProto) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == "layers.1.o.weight")
    tensor.dims[1] += 1


def no_constant(model: onnx.ModelProto) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == "layers.1.o.weight")
    model.graph.input.append(
        helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, list(tensor.dims))
    )
    model.graph.initializer.remove(tensor)


def other_operator(model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if "layers.1.o.weight" in node.input).op_type = "Gemm"


@pytest.mark.parametrize("edit", [other_name, other_shape, no_constant, other_operator])
@pytest.mark.parametrize("operator", [False, True])
def test_a_product_that_is_not_found_is_told(fp32: Artifact, edit: Edit, operator: bool) -> None:
    model, spec = lowered(fp32), fp32.manifest.model
    edit(model)
    wanted = r"1 of 14 are not found in the graph, the first is o_proj of layer 1"
    with pytest.raises(ArtifactError, match=wanted):
        add_lora_operator(model, spec, 8) if operator else add_lora(model, spec)


def test_names_that_are_taken_do_not_matter(fp32: Artifact) -> None:
    model, spec = lowered(fp32), fp32.manifest.model
    first = model.graph.node[0]
    first.name = "layers.0.qkv.lora.a"
    names = [node.name for node in add_lora(model, spec).model.graph.node]
    assert len(set(names)) == len(names)
