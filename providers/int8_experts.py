"""Experts in MXFP4 on a device that has no operator for them, where memory allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx

from onnxport.errors import CapacityError
from onnxport.graphs.passes.int8_experts import Which, int8_bytes, write_int8_experts
from onnxport.providers import memory

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
    needed, free = int8_bytes(graph, dtype, which), memory.available_bytes()
    if needed >= free:
        raise CapacityError(
            "experts in MXFP4 do not fit: here is no operator for them as they are, in 8 bits they "
            f"take {needed / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free. Free memory, "
            "or export without --expert-precision."
        )
    return write_int8_experts(graph, artifact.read_tensor, dtype, which)
