"""The graph that the `cpu` provider runs: as an earlier start left it, or lowered now."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from numpy.typing import NDArray

from onnxport import cache_rows
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.providers import memory
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu import library
from onnxport.providers.cpu.caches import Layout
from onnxport.providers.graph_cache import GraphCache, LoweredGraph, graph_key
from onnxport.providers.layer_groups import layer_groups
from onnxport.providers.pool import check_int8_experts

if TYPE_CHECKING:
    import onnx

    from onnxport.providers.host_lora import HostLora

logger = logging.getLogger(__name__)

# Modules outside of this folder that make what is kept.
SHARED: Final = ("graph_cache.py", "int8_experts.py", "memory_plan.py", "ort.py")


class GraphSource:
    """Reads what was kept; else reads the artifact's graph, applies the passes and keeps that.

    Attributes:
        groups: layers that share block tables.
    """

    def __init__(self, artifact: Artifact, options: LoadOptions, *, custom: bool) -> None:
        """Look for a graph that was kept.

        Args:
            artifact: what is loaded.
            options: the passes obey them.
            custom: whether attention is to be our kernel's.
        """
        self._artifact = artifact
        self._options = options
        self.groups = layer_groups(artifact.manifest.model, options)
        self._kept = find_graph_cache(artifact, options, custom=custom)
        self._known = self._kept.read() if self._kept else None

    @cached_property
    def is_exact(self) -> bool:
        """Whether all products are to be in float32."""
        if self._known is not None:
            return self._known.is_exact
        from onnxport.graphs.passes.accuracy import takes_int8

        return not takes_int8(self._graph, self._options.matmul_accuracy_level)

    def lowered(
        self, cache: tuple[str, Layout], lora: HostLora | None
    ) -> tuple[LoweredGraph, dict[str, NDArray[Any]]]:
        """Return the graph to run, and the contents of the initializers that are attached to it.

        Args:
            cache: type and layout of the KV caches; "plain" for the decomposed graph.
            lora: adds adapters, if there are to be any; such a graph was never kept.

        Raises:
            CapacityError: There is no memory for weights that are made.
        """
        if self._known is not None:
            logger.info("%s: lowered by an earlier start", self._artifact.path.name)
            check_int8_experts(memory.available_bytes(), self._known.int8_bytes)
            return self._known, self._known.convert(self._artifact)
        graph, converted = self._lower(cache, lora)
        if self._kept:
            self._kept.write(graph)
        return graph, converted

    @cached_property
    def _graph(self) -> onnx.ModelProto:
        """The artifact's."""
        return self._artifact.load_graph("paged")

    def _lower(
        self, cache: tuple[str, Layout], lora: HostLora | None
    ) -> tuple[LoweredGraph, dict[str, NDArray[Any]]]:
        # Its passes import onnx.
        from onnxport.providers.cpu import lowering

        artifact = self._artifact
        steps = list(
            lowering.lower(
                *(self._graph, artifact, self._options, cache, lora),
                groups=self.groups,
                int8=library.matmul_isa() is not None,
                summaries=library.summarizes(),
            )
        )
        for step in steps:
            logger.info("%s: %s", artifact.path.name, step)
        lowered = lowering.lowered_graph(
            artifact, steps, is_exact=self.is_exact, is_native=cache[1] != "plain"
        )
        return lowered, lowering.converted(steps)


def find_graph_cache(
    artifact: Artifact, options: LoadOptions, *, custom: bool
) -> GraphCache | None:
    """Where the lowered graph is kept; None where it is not, as with adapters."""
    if options.graph_cache is None or options.max_adapters:
        return None
    import onnxruntime as ort

    groups = layer_groups(artifact.manifest.model, options)
    choices = {
        "provider": "cpu",
        "onnxruntime": ort.__version__,
        "attention": "custom" if custom else "decomposed",
        "kv_cache_dtype": options.kv_cache_dtype,
        "matmul_accuracy_level": options.matmul_accuracy_level,
        "matmul_isa": library.matmul_isa(),
        "summarizes": library.summarizes(),
        "prefers_pairs": library.prefers_pairs(),
        "converts_half": library.converts_half(),
        "coarse_head": options.coarse_head,
        "hidden_layers": str(options.hidden_layers) if options.hidden_layers else None,
        "final_states": options.final_states or None,
        "cache_groups": str(groups.places) if len(groups.windows) > 1 else None,
    }
    graphs, own = Path(contract.__file__).parent, Path(__file__).parent
    shared = [*(own.parent / name for name in SHARED), Path(cache_rows.__file__)]
    key = graph_key(artifact, (graphs, graphs / "passes", own, *shared), choices)
    return None if key is None else GraphCache(options.graph_cache, key)
