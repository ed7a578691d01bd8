"""Let a graph tell what chosen layers read of the residual stream.

That is what a draft head goes on from (`graphs.draft_spec`): of each token of a step, before the
layer's norm. Before what fuses norms, and where no output of the graph is in its way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import TensorProto

from onnxport.errors import ArtifactError
from onnxport.graphs import contract
from onnxport.graphs.inspect import element_types
from onnxport.graphs.passes.gated_silu import DOMAIN, OPSET
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.spec import ArchSpec

TELL_HIDDEN_STATES: Final = "TellHiddenStates"  # asked, states... -> states, times scale
_SKIP_NORM: Final = "SkipSimplifiedLayerNormalization"
_NORMS: Final = ("SimplifiedLayerNormalization", _SKIP_NORM, "LayerNormalization")
_TOTAL: Final = 3  # the output of a norm that adds first: what it has normalized


def tell_hidden_states(model: onnx.ModelProto, layers: Sequence[int], spec: ArchSpec) -> PassResult:
    """Add the output HIDDEN_STATES; without layers nothing changes.

    Args:
        model: A paged graph of the exporter's, whose nodes still have the names of their layers.
        layers: Numbers from 0, in the order in which their states lie side by side.
        spec: What the graph computes.

    Raises:
        ArtifactError: A layer is not there, or not as the exporter writes it; or how large the
            stream is in the model cannot be known.
    """
    if not layers:
        return PassResult("hidden_states", model, {})
    if spec.residual_scale is not None and spec.stream_scale is None:
        raise ArtifactError(
            f"hidden_states: this artifact of the family {spec.family} was written by an exporter "
            "that did not say how large the residual stream is in the model; export it again"
        )
    copy = copy_model(model)
    nodes = {node.name: node for node in copy.graph.node}
    types = element_types(copy)
    read = [_read_by(nodes, layer) for layer in layers]
    for number, value in enumerate(read):
        if types.get(value) != TensorProto.FLOAT:
            read[number] = f"{contract.HIDDEN_STATES}.{number}.float"
            name = f"{contract.HIDDEN_STATES}.{number}.cast"
            copy.graph.node.append(
                onnx.helper.make_node(
                    "Cast", [value], [read[number]], name=name, to=TensorProto.FLOAT
                )
            )
    joined, name = contract.HIDDEN_STATES, f"{contract.HIDDEN_STATES}.join"
    if spec.stream_scale is not None:
        joined, scale = f"{contract.HIDDEN_STATES}.stream", f"{contract.HIDDEN_STATES}.scale"
        factor = np.array(spec.stream_scale, np.float32)
        copy.graph.initializer.append(onnx.numpy_helper.from_array(factor, scale))
        scaled = onnx.helper.make_node(
            "Mul", [joined, scale], [contract.HIDDEN_STATES], name=f"{scale}.multiply"
        )
    copy.graph.node.append(onnx.helper.make_node("Concat", read, [joined], name=name, axis=-1))
    if spec.stream_scale is not None:
        copy.graph.node.append(scaled)
    dims = [contract.NUM_TOKENS, len(layers) * spec.hidden_size]
    copy.graph.output.append(
        onnx.helper.make_tensor_value_info(contract.HIDDEN_STATES, TensorProto.FLOAT, dims)
    )
    return PassResult("hidden_states", copy, {"layers that tell what they read": len(layers)})


def tell_when_asked(model: onnx.ModelProto) -> PassResult:
    """Give the graph TELLS_STATES, so that steps of which nobody wants the states compute none.

    For devices whose operator library has `onnxport.TellHiddenStates`; of what `tell_hidden_states`
    returns. Where the graph tells nothing, nothing changes.
    """
    copy = copy_model(model)
    made_by = {value: node for node in copy.graph.node for value in node.output}
    last = made_by.get(contract.HIDDEN_STATES)
    if last is None or last.op_type == TELL_HIDDEN_STATES:
        return PassResult("tell_when_asked", copy, {})
    scale = 1.0
    if last.op_type == "Mul":
        factor = next(one for one in copy.graph.initializer if one.name == last.input[1])
        scale = onnx.numpy_helper.to_array(factor).item()
        copy.graph.initializer.remove(factor)
        copy.graph.node.remove(last)
        last = made_by[last.input[0]]
    copy.graph.node.remove(last)
    copy.graph.node.append(
        onnx.helper.make_node(
            TELL_HIDDEN_STATES,
            [contract.TELLS_STATES, *last.input],
            [contract.HIDDEN_STATES],
            name=last.name,
            domain=DOMAIN,
            scale=scale,
        )
    )
    copy.graph.input.append(
        onnx.helper.make_tensor_value_info(contract.TELLS_STATES, TensorProto.INT32, [1])
    )
    if DOMAIN not in {opset.domain for opset in copy.opset_import}:
        copy.opset_import.append(onnx.helper.make_opsetid(DOMAIN, OPSET))
    return PassResult("tell_when_asked", copy, {"outputs that are computed for who asks": 1})


def _read_by(nodes: Mapping[str, onnx.NodeProto], layer: int) -> str:
    """The residual stream that a layer reads."""
    norm = nodes.get(f"layers.{layer}.input_norm")
    if norm is not None and norm.op_type in _NORMS:
        return str(norm.output[_TOTAL] if norm.op_type == _SKIP_NORM else norm.input[0])
    # Layers without a norm ahead add what the one before has made first, but for the first layer,
    # whose attention's output is added to what it read.
    added = nodes.get(f"layers.{layer}.residual")
    if norm is None and added is not None and added.op_type == "Add":
        read = str(added.input[0] if layer == 0 else added.output[0])
        made = next((node for node in nodes.values() if read in node.output), None)
        # Of a single layer these may be the rows that need logits.
        is_some = made is not None and contract.LOGITS_INDICES in made.input
        return str(made.input[0]) if made is not None and is_some else read
    raise ArtifactError(
        f"hidden_states: layer {layer} is not in the graph as the exporter writes it; export the "
        "model again"
    )
