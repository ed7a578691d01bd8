"""The compiled kernel that a graph with adapters brings along."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.errors import ArtifactError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.passes.compiled_lora import IMAGE, compiled_lora
from onnxport.graphs.passes.lora import ADD_LORA, add_lora_operator
from tests.conformance.make import make_artifact


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return Artifact.read(make_artifact(tmp_path_factory.mktemp("lora"), "llama", "fp32"))


def test_every_operator_reads_it_once(fp32: Artifact) -> None:
    spec = fp32.manifest.model
    before = add_lora_operator(fp32.load_graph("paged"), spec, 8).model
    result = compiled_lora(before, b"\x7fELF\0kernel")
    added = [node for node in result.model.graph.node if node.op_type == ADD_LORA]
    assert len(added) == 4 * spec.num_layers
    assert result.changes == {"AddLora": len(added)}
    assert {(len(node.input), node.input[5]) for node in added} == {(6, IMAGE)}
    (tensor,) = (one for one in result.model.graph.initializer if one.name == IMAGE)
    assert tensor.data_type == TensorProto.UINT8
    assert numpy_helper.to_array(tensor).tobytes() == b"\x7fELF\0kernel"
    others = [node for node in before.graph.node if node.op_type != ADD_LORA]
    assert [node for node in result.model.graph.node if node.op_type != ADD_LORA] == others
    assert not any(IMAGE in node.input for node in before.graph.node)


def test_a_graph_without_adapters_is_left_alone(fp32: Artifact) -> None:
    model = fp32.load_graph("paged")
    assert compiled_lora(model, b"kernel").model == model


def test_a_name_that_is_taken_is_refused(fp32: Artifact) -> None:
    model = fp32.load_graph("paged")
    taken = helper.make_tensor(IMAGE, TensorProto.UINT8, [1], np.zeros(1, np.uint8))
    model.graph.initializer.append(taken)
    with pytest.raises(ArtifactError, match=r"has a value 'lora\.image'"):
        compiled_lora(model, b"kernel")
