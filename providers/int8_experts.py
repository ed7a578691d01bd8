"""Experts in MXFP4 on a device that has no operator for them, where memory allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx

from onnxport.graphs.passes.int8_experts import Which, int8_bytes, write_int8_experts
from onnxport.providers import memory
from onnxport.providers.pool import check_int8_experts

if TYPE_CHECKING:
    from onnxport.graphs.artifact import Artifact
    from onnxport.graphs.passes.result import PassResult


def int8_experts(
    artifact: Artifact, graph: onnx.ModelProto, dtype: str, which: Which = lambda node: True
) -> PassResult:
    """`write_int8_experts`, on weights of an artifact.

    Raises:
        ArtifactError: See there.
        CapacityError: There is no memory for what is made.
    """
    check_int8_experts(memory.available_bytes(), int8_bytes(graph, dtype, which))
    return write_int8_experts(graph, artifact.read_tensor, dtype, which)
