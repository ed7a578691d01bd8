"""Which layers of a model share block tables, where a provider can have several."""

from __future__ import annotations

from onnxport.graphs.cache_groups import LayerGroups, group_layers
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import LoadOptions


def layer_groups(spec: ArchSpec, options: LoadOptions) -> LayerGroups:
    """Groups by the windows of the layers, unless the options want one table for all."""
    if not options.hybrid_kv_cache:
        return LayerGroups.single(len(spec.cached_layers))
    windows = [spec.sliding_window[layer] for layer in spec.cached_layers]
    return group_layers(windows, options.max_model_len or spec.context_length)
