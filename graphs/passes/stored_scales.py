"""Give our products their scales as the artifact stores them.

`retype` converts scales to float32 for ONNX Runtime's operators. Ours pack them as they are and
compute with the same numbers, so nothing has to be converted and kept in memory. For devices
whose operator library has them, after `use_gather_rows`, `use_int8_matmul`,
`fuse_gated_mlp` and `use_gated_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx
from onnx import TensorProto

from onnxport.graphs.inspect import consumers, initializers, names
from onnxport.graphs.passes.gated_experts import GATED_EXPERTS
from onnxport.graphs.passes.gated_mlp import GATED_MLP
from onnxport.graphs.passes.gated_silu import DOMAIN
from onnxport.graphs.passes.gather_rows import GATHER_ROWS
from onnxport.graphs.passes.int8_matmul import MATMUL_NBITS
from onnxport.graphs.passes.result import PassResult, copy_model

_SCALES: Final[Mapping[str, tuple[int, ...]]] = {
    MATMUL_NBITS: (2,),
    GATED_MLP: (2, 4),
    GATED_EXPERTS: (3, 5),
    GATHER_ROWS: (2,),
}


def use_stored_scales(model: onnx.ModelProto, stored: onnx.ModelProto) -> PassResult:
    """Let our operators read float16 scales of the graph that `model` was made of.

    An operator takes all its scales in one type, so all of a node's or none are replaced.
    Converted scales that nothing else reads are dropped.

    Args:
        model: A lowered graph, in float32.
        stored: The artifact's graph; scales are found there by their names.
    """
    halves = {
        name: tensor
        for name, tensor in initializers(stored).items()
        if tensor.data_type == TensorProto.FLOAT16
    }
    copy = copy_model(model)
    taken = names(copy)
    replaced: dict[str, str] = {}
    for node in copy.graph.node:
        places = _SCALES.get(node.op_type, ()) if node.domain == DOMAIN else ()
        if len(node.input) <= max(places, default=0):  # rows of floats have no scales
            continue
        if not places or any(node.input[place] not in halves for place in places):
            continue
        for place in places:
            name = node.input[place]
            if name not in replaced:
                replaced[name] = _fresh(f"{name}.stored", taken)
            node.input[place] = replaced[name]
    read = consumers(copy).keys() | {info.name for info in copy.graph.output}
    kept = [
        tensor
        for tensor in model.graph.initializer
        if tensor.name in read or tensor.name not in replaced
    ]
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(kept)
    for name, fresh in replaced.items():
        tensor = copy.graph.initializer.add()
        tensor.CopyFrom(halves[name])
        tensor.name = fresh
    changes = {"scales as they are stored": len(replaced)} if replaced else {}
    return PassResult("stored_scales", copy, changes)


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
