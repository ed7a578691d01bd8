"""Which layers of a model share block tables, where a provider can have several."""

from __future__ import annotations

from onnxport.graphs.cache_groups import LayerGroups, group_layers
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import LoadOptions

# Of caches that layers share: their place in a block, their KV heads, and channels of these.
CacheKind = tuple[int, int, int]


def layer_groups(spec: ArchSpec, options: LoadOptions) -> LayerGroups:
    """Groups by the windows of the layers, unless the options want one table for all."""
    if not options.hybrid_kv_cache:
        return LayerGroups.single(len(spec.cached_layers))
    windows = [spec.sliding_window[layer] for layer in spec.cached_layers]
    heads = [kind[1:] for kind in cache_kinds(spec, LayerGroups.single(len(windows)))]
    return group_layers(windows, options.max_model_len or spec.context_length, heads)


def cache_kinds(spec: ArchSpec, groups: LayerGroups) -> list[CacheKind]:
    """Of each layer with keys and values the caches that it has; those that are equal are one."""
    heads = [spec.heads_of(layer) for layer in spec.cached_layers]
    return [
        (place, one.num_kv_heads, one.head_size)
        for (_, place), one in zip(groups.places, heads, strict=True)
    ]
