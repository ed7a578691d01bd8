"""Adapters fused into products: where, where not, and that no bit changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import attribute_int
from onnxport.graphs.lora import WEIGHTS, SlotDtype
from onnxport.graphs.passes.gated_mlp import fuse_gated_mlp
from onnxport.graphs.passes.gated_silu import fuse_gated_silu
from onnxport.graphs.passes.input_norm import fuse_input_norm
from onnxport.graphs.passes.int8_matmul import use_int8_matmul
from onnxport.graphs.passes.lora import add_lora_operator
from onnxport.graphs.passes.product_adapters import fuse_product_adapters
from onnxport.graphs.passes.product_bias import fuse_product_bias
from onnxport.graphs.passes.retype import retype
from onnxport.providers.cpu.library import find_library, matmul_isa
from tests.conformance.make import make_artifact
from tests.kernels import matmul_cases, matmul_lora_cases
from tests.kernels.mlp_lora_cases import INPUTS

CASE = matmul_lora_cases.make_case(6, 5)
WITH_ZERO_POINTS = matmul_lora_cases.make_case(7, 5)
WITH_OFFSETS = matmul_lora_cases.make_case(8, 5)
FIRED = {"adapters added by their products": 1}
PRODUCT, ADDING = 0, 1  # places in the model


def model(case: matmul_lora_cases.AdaptedProduct = CASE) -> onnx.ModelProto:
    """A product, what adapters add to it, and a bias."""
    of = onnx.load_from_string(matmul_lora_cases.separate(case))
    product, adding = of.graph.node
    product.input[5] = ""
    adding.output[0] = "adapted"
    of.graph.node.append(helper.make_node("Add", ["adapted", "bias"], ["y"]))
    return of


@pytest.mark.parametrize("case", [CASE, WITH_ZERO_POINTS, WITH_OFFSETS])
def test_they_go_into_the_product_and_the_bias_after_them(
    case: matmul_lora_cases.AdaptedProduct,
) -> None:
    before = model(case)
    untouched = before.SerializeToString()
    result = fuse_product_adapters(before)
    assert result.changes == FIRED
    assert before.SerializeToString() == untouched
    assert not fuse_product_adapters(result.model).changes
    biased = fuse_product_bias(result.model)
    assert biased.changes == {"biases added by their products": 1}
    (node,) = biased.model.graph.node
    places = {id(WITH_ZERO_POINTS): ["", "", "z"], id(WITH_OFFSETS): ["", "", "", "o"]}
    behind = places.get(id(case), [])
    assert list(node.input) == ["x", "w", "s", "", "", "bias", "", "", *INPUTS, *behind]
    assert list(node.output) == ["y"]
    library = find_library()
    if library is None or matmul_isa() is None:
        pytest.skip("the C++ kernels were not built, or this processor has no kernel of ours")
    wanted = onnx.load_from_string(matmul_lora_cases.fused(case))
    found, same = (
        matmul_cases.session(library, of.SerializeToString()).run(["y"], case.feeds())[0]
        for of in (biased.model, wanted)
    )
    assert found.tobytes() == same.tobytes()


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return Artifact.read(make_artifact(tmp_path_factory.mktemp("adapted"), "qwen2", "int4"))


def prepared(artifact: Artifact, dtype: SlotDtype) -> onnx.ModelProto:
    """As the cpu provider has it before the pass."""
    graph = retype(artifact.load_graph("paged"), artifact.read_tensor).model
    adapted = add_lora_operator(graph, artifact.manifest.model, 8, dtype).model
    return fuse_gated_mlp(use_int8_matmul(fuse_gated_silu(adapted).model).model).model


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8), ("int4", 4)])
def test_a_decoder_is_left_without_an_operator_of_adapters(
    int4: Artifact, dtype: SlotDtype, bits: int
) -> None:
    layers = int4.manifest.model.num_layers
    before = prepared(int4, dtype)
    result = fuse_product_adapters(before)
    adding = [node for node in result.model.graph.node if WEIGHTS in node.input]
    assert {attribute_int(node, "adapter_bits", -1) for node in adding} == {bits}
    assert result.changes == {"adapters added by their products": 2 * layers}
    normed = fuse_input_norm(result.model)
    assert normed.changes == {"norms fused into what reads them": 2 * layers}
    biased = fuse_product_bias(normed.model)
    assert biased.changes == {"biases added by their products": layers}
    nodes = biased.model.graph.node
    assert not {"AddLora", "Add"} & {node.op_type for node in nodes}
    assert all(len(node.output) <= 2 for node in nodes if node.op_type == "MatMulNBits")


def test_adapters_in_floats_are_left_alone(int4: Artifact) -> None:
    floats: tuple[SlotDtype, ...] = ("float32", "float16")
    for dtype in floats:
        assert not fuse_product_adapters(prepared(int4, dtype)).changes


Change = Callable[[onnx.ModelProto], None]


def _also_reads(of: onnx.ModelProto) -> None:
    of.graph.node.append(helper.make_node("Neg", ["base"], ["other"]))


def _is_an_output(of: onnx.ModelProto) -> None:
    of.graph.output.append(helper.make_tensor_value_info("base", TensorProto.FLOAT, None))


def _other_input(of: onnx.ModelProto) -> None:
    of.graph.node.insert(0, helper.make_node("Neg", ["x"], ["opposite"]))
    of.graph.node[1 + ADDING].input[1] = "opposite"


def _has_a_bias(of: onnx.ModelProto) -> None:
    of.graph.node[PRODUCT].input.extend(["", "", "bias"])


def _computed_between(of: onnx.ModelProto) -> None:
    """The ranks are made after the product: it cannot read them."""
    of.graph.node.insert(ADDING, helper.make_node("Identity", ["ranks"], ["made"]))
    of.graph.node[1 + ADDING].input[3] = "made"


def _without_scales(of: onnx.ModelProto) -> None:
    of.graph.node[ADDING].input.pop()


def _kind(place: int, kind: str) -> Change:
    def change(of: onnx.ModelProto) -> None:
        of.graph.node[place].op_type = kind

    return change


def _domain(place: int) -> Change:
    def change(of: onnx.ModelProto) -> None:
        of.graph.node[place].domain = "com.microsoft"

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_also_reads, id="another reader"),
        pytest.param(_is_an_output, id="an output"),
        pytest.param(_other_input, id="adapters of another input"),
        pytest.param(_has_a_bias, id="more inputs"),
        pytest.param(_computed_between, id="computed too late"),
        pytest.param(_without_scales, id="no scales"),
        pytest.param(_kind(PRODUCT, "GatedSilu"), id="no product"),
        pytest.param(_kind(ADDING, "GatedSilu"), id="no adapters"),
        pytest.param(_domain(PRODUCT), id="the product of others"),
        pytest.param(_domain(ADDING), id="adapters of others"),
    ],
)
def test_near_misses_are_left_alone(change: Change) -> None:
    of = model()
    assert fuse_product_adapters(of).changes == FIRED
    change(of)
    result = fuse_product_adapters(of)
    assert not result.changes
    assert result.model.SerializeToString() == of.SerializeToString()


def test_a_bias_that_is_there_already_stays() -> None:
    """A product has room for one."""
    of = onnx.load_from_string(matmul_lora_cases.fused(CASE))
    of.graph.node[0].output[0] = "adapted"
    bias = np.ones(CASE.product.n, np.float32)
    of.graph.initializer.append(numpy_helper.from_array(bias, "second"))
    of.graph.node.append(helper.make_node("Add", ["adapted", "second"], ["y"]))
    assert not fuse_product_bias(of).changes
