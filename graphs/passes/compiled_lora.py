"""Give every AddLora the kernel that its device runs, compiled."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from onnxport.errors import ArtifactError
from onnxport.graphs.inspect import names
from onnxport.graphs.passes.lora import ADD_LORA
from onnxport.graphs.passes.result import PassResult, copy_model

IMAGE: Final = "lora.image"


def compiled_lora(model: onnx.ModelProto, image: bytes) -> PassResult:
    """Add one input to all nodes that `add_lora_operator` made: a compiled module, uint8 [bytes].

    Args:
        model: A paged graph with AddLora, whose adapters are floats.
        image: The module, as the device's driver loads it.

    Raises:
        ArtifactError: The graph has a value of the input's name.
    """
    copy = copy_model(model)
    if IMAGE in names(copy):
        raise ArtifactError(f"compiled_lora: the graph has a value {IMAGE!r}")
    changed = 0
    for node in copy.graph.node:
        if node.op_type == ADD_LORA:
            node.input.append(IMAGE)
            changed += 1
    if changed:
        tensor = numpy_helper.from_array(np.frombuffer(image, np.uint8), IMAGE)
        copy.graph.initializer.append(tensor)
    return PassResult("compiled_lora", copy, {"AddLora": changed})
