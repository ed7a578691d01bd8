"""What is refused: options that do not go with a model, and what came of compiling it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import onnx

from onnxport.errors import ProviderError
from onnxport.graphs.passes.flat_paged import has_sinks
from onnxport.graphs.passes.split_experts import MOE, QMOE
from onnxport.providers.base import LoadOptions
from onnxport.providers.openvino.compiled import precision
from onnxport.providers.openvino.experts import PRODUCTS, count_gathers
from onnxport.providers.openvino.model import Graph
from onnxport.providers.openvino.plugin import Build, Plugin
from onnxport.providers.openvino.self_test import distrust

logger = logging.getLogger(__name__)


def check_attention(options: LoadOptions) -> None:
    """Refuse an attention that is not OpenVINO's own."""
    if options.attention not in (None, "native"):
        raise ProviderError(
            f"the openvino provider has no {options.attention!r} attention; it runs OpenVINO's "
            "own, ask for native or leave it out"
        )


def check_sinks(model: onnx.ModelProto, plugin: Plugin) -> None:
    """Refuse attention sinks on a device where nobody saw them, for `check_trust` tries none."""
    if has_sinks(model) and not plugin.proven:
        raise ProviderError(
            f"the heads of this model have attention sinks, which were never tried on OpenVINO's "
            f"{plugin.device}; use openvino on the processor, or another provider"
        )


def check_trust(core: Any, plugin: Plugin, build: Build) -> None:
    """Refuse a device that gives wrong answers, where nobody saw it give the right ones."""
    if not plugin.proven and (reason := distrust(core, plugin, build.config)):
        raise ProviderError(
            f"{plugin.device} is not to be trusted: {reason}. Update its driver, or use "
            "another provider"
        )


def check_precision(compiled: Any, plugin: Plugin, options: LoadOptions) -> None:
    """Refuse another type than the one that was asked for, and one that does not work."""
    found = precision(compiled)
    if options.dtype not in ("auto", found):
        raise ProviderError(
            f"dtype is {options.dtype!r}, but on this device OpenVINO made a graph in {found}; "
            "ask for that, or for auto"
        )
    if found in plugin.wrong:
        raise ProviderError(
            f"dtype is {options.dtype!r}, and OpenVINO made a graph in {found}; "
            f"{plugin.wrong[found]}"
        )


def check_experts(model: onnx.ModelProto, graphs: Sequence[Graph]) -> None:
    """Say so where the plugin did not know the pattern of experts that `lower` kept for it."""
    kept = sum(node.op_type in (MOE, QMOE) for node in model.graph.node)
    if any(count_gathers(graph.compiled) < PRODUCTS * kept for graph in graphs):
        logger.warning(
            "OpenVINO did not recognize all of %d layers of experts, and computes every expert for "
            "each token there; results are the same, after several times the work",
            kept,
        )
