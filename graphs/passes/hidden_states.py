"""Let a graph tell what chosen layers read of the residual stream, or what its final norm makes.

What layers read is what a draft head goes on from (`graphs.draft_spec`): of each token of a step,
before the layer's norm. What the final norm makes of a token is what embeddings are made of. Before
what fuses norms, and where no output of the graph is in its way.
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
_NO_NORM: Final = "Identity"  # what is called a final norm where there is none
_TOTAL: Final = 3  # the output of a norm that adds first: what it has normalized
_FINAL: Final = "final_norm"


def tell_hidden_states(
    model: onnx.ModelProto, layers: Sequence[int], spec: ArchSpec, *, final: bool = False
) -> PassResult:
    """Add the output HIDDEN_STATES; without layers and `final` nothing changes.

    Args:
        model: A paged graph of the exporter's, whose nodes still have the names of their layers.
        layers: Numbers from 0, in the order in which their states lie side by side.
        spec: What the graph computes.
        final: Whether what the final norm makes of each token lies behind them. All tokens then go
            through what follows the last attention, and rows that need logits are chosen behind it.

    Raises:
        ArtifactError: A layer is not there, or not as the exporter writes it; or how large the
            stream is in the model cannot be known.
    """
    if not layers and not final:
        return PassResult("hidden_states", model, {})
    if layers and spec.altup is not None:
        raise ArtifactError(
            f"hidden_states: a model of the family {spec.family} has {spec.altup.streams} residual "
            "streams, and what reads the states of layers wants one; use it without"
        )
    if layers and spec.stream_norms:
        raise ArtifactError(
            f"hidden_states: layers of this model of the family {spec.family} have norms of the "
            "residual stream itself, and what reads the states of layers wants one that is not "
            "normalized; use it without"
        )
    if final and spec.embedding_size is not None:
        raise ArtifactError(
            f"hidden_states: this model of the family {spec.family} is {spec.hidden_size} wide "
            f"and its head reads {spec.embedding_size} numbers of a product behind that, which "
            "vectors would have to be made of, and are not; use a model without that product"
        )
    if layers and spec.residual_scale is not None and spec.stream_scale is None:
        raise ArtifactError(
            f"hidden_states: this artifact of the family {spec.family} was written by an exporter "
            "that did not say how large the residual stream is in the model; export it again"
        )
    copy = copy_model(model)
    nodes = {node.name: node for node in copy.graph.node}
    types = element_types(copy)
    told = [(_read_by(nodes, layer), spec.stream_scale) for layer in layers]
    if final:
        source, like = _normed_by_final(copy)
        types[source] = types.get(like, TensorProto.UNDEFINED)
        told.append((source, spec.logits_scale and 1 / spec.logits_scale))
    scales = {scale for _, scale in told}
    parts = []
    for number, (value, scale) in enumerate(told):
        name = f"{contract.HIDDEN_STATES}.{number}"
        if types.get(value) != TensorProto.FLOAT:
            value = _cast(copy, value, name)
        parts.append(value if len(scales) == 1 else _scaled(copy, value, scale, name))
    (common,) = scales if len(scales) == 1 else (None,)
    joined = contract.HIDDEN_STATES if common is None else f"{contract.HIDDEN_STATES}.stream"
    name = f"{contract.HIDDEN_STATES}.join"
    copy.graph.node.append(onnx.helper.make_node("Concat", parts, [joined], name=name, axis=-1))
    _scaled(copy, joined, common, contract.HIDDEN_STATES, contract.HIDDEN_STATES)
    dims = [contract.NUM_TOKENS, len(told) * spec.hidden_size]
    copy.graph.output.append(
        onnx.helper.make_tensor_value_info(contract.HIDDEN_STATES, TensorProto.FLOAT, dims)
    )
    changes = {"layers that tell what they read": len(layers)} if layers else {}
    if final:
        changes["final norms that tell"] = 1
    return PassResult("hidden_states", copy, changes)


def _cast(model: onnx.ModelProto, value: str, name: str) -> str:
    """A value as float32."""
    made = f"{name}.float"
    node = onnx.helper.make_node("Cast", [value], [made], name=f"{name}.cast", to=TensorProto.FLOAT)
    model.graph.node.append(node)
    return made


def _scaled(
    model: onnx.ModelProto, value: str, scale: float | None, name: str, made: str | None = None
) -> str:
    """A value of float32 times a number; None: as it is.

    Args:
        model: The graph.
        value: In it.
        scale: The number.
        name: Of what is added.
        made: The name of the product; None: one of its own.
    """
    if scale is None:
        return value
    made, factor = made or f"{name}.scaled", f"{name}.scale"
    number = np.array(scale, np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(number, factor))
    node = onnx.helper.make_node("Mul", [value, factor], [made], name=f"{factor}.multiply")
    model.graph.node.append(node)
    return made


def _normed_by_final(model: onnx.ModelProto) -> tuple[str, str]:
    """What the final norm makes of all tokens, and what it makes of the rows that need logits.

    They are two norms: the second stays what the head reads, so that whatever is fused with that,
    and the bits of the logits, stay as they are.
    """
    chosen = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Gather" and node.input[1] == contract.LOGITS_INDICES
    }
    norm = next((node for node in model.graph.node if node.name == _FINAL), None)
    if norm is None or norm.op_type not in (*_NORMS, _NO_NORM) or not chosen:
        raise ArtifactError(
            "hidden_states: the end of the last layer is not in the graph as the exporter writes "
            "it; export the model again"
        )
    nodes = [node for node in model.graph.node if node.output[0] not in chosen]
    for node in nodes:
        for place, value in enumerate(node.input):
            node.input[place] = chosen.get(value, value)
    told = onnx.NodeProto()
    told.CopyFrom(norm)
    told.name, made = f"{contract.HIDDEN_STATES}.norm", f"{contract.HIDDEN_STATES}.normed"
    told.output[:] = [made]
    selections = []
    # The stream, and what is added to it first where the norm does that.
    for place in range(2 if norm.op_type == _SKIP_NORM else 1):
        rows = f"{contract.HIDDEN_STATES}.selected.{place}"
        selections.append(
            onnx.helper.make_node(
                "Gather", [norm.input[place], contract.LOGITS_INDICES], [rows], name=rows, axis=0
            )
        )
        norm.input[place] = rows
    place = next(place for place, node in enumerate(nodes) if node is norm)
    like, kept = norm.output[0], [*nodes[:place], told, *selections, *nodes[place:]]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return made, like


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
