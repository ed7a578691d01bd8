"""The caches of all layers of a compiled model, whose heads may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnxport.errors import OptionError, ProviderError
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import LoadOptions
from onnxport.providers.blocks import SeveralBlocks
from onnxport.providers.openvino.caches import CacheFormat
from onnxport.providers.openvino.compiled import cache_format
from onnxport.providers.openvino.model import Graph
from onnxport.providers.openvino.plugin import Plugin
from onnxport.providers.openvino.tensors import TensorPair
from onnxport.providers.transfers import Blocks


def check_caches(
    graphs: Sequence[Graph], plugin: Plugin, spec: ArchSpec, options: LoadOptions
) -> list[CacheFormat]:
    """What the plugin made of each layer's caches, held to what was asked for.

    Layers are those that have any, `ArchSpec.cached_layers`. Their caches are of one type, in
    blocks of as many tokens.

    Raises:
        ProviderError: the plugin stores them in a way that is not known here, or in other blocks
            than were asked for.
        OptionError: it stores them in another type than was asked for.
    """
    found = [_formats(graph, plugin, spec) for graph in graphs]
    forms = found[0]
    assert found.count(forms) == len(found), f"graphs do not share caches: {found}"
    form = forms[0]
    alike = {(one.dtype, one.block_size) for one in forms}
    if len(alike) > 1:
        raise ProviderError(
            f"OpenVINO stores the K/V of layers in blocks of several kinds: {sorted(alike)}; "
            "use another provider, such as cpu"
        )
    if options.kv_cache_dtype not in ("auto", form.dtype):
        raise OptionError(
            f"kv_cache_dtype is {options.kv_cache_dtype!r}, but on this device OpenVINO made "
            f"a cache of {form.dtype}; ask for that, or for auto"
        )
    if options.block_size not in (None, form.block_size):
        raise ProviderError(
            f"block_size is {options.block_size}; OpenVINO stores blocks of {form.block_size} "
            f"tokens on a {plugin.device}, ask for that or leave it out"
        )
    return forms


def row_bytes(spec: ArchSpec, forms: Sequence[CacheFormat]) -> Callable[[int], float]:
    """Returns `bytes_of(head size)`, of a token's keys or values in a KV head.

    Scales and zeros are shared out among the tokens of a block, and among keys and values.
    """
    sizes = [spec.heads_of(layer) for layer in spec.cached_layers]
    found = {
        one.head_size: form.layer_bytes / (2 * one.num_kv_heads * form.block_size)
        for one, form in zip(sizes, forms, strict=True)
    }
    return found.__getitem__


def allocate(
    core: Any, plugin: Plugin, forms: Sequence[CacheFormat], num_blocks: int
) -> tuple[list[TensorPair], Blocks]:
    """Zeroed caches of each layer, and what moves their blocks.

    Raises whatever OpenVINO raises.
    """
    pairs: dict[int, TensorPair] = {}
    moved: list[Blocks] = []
    for form in dict.fromkeys(forms):
        own = [number for number, one in enumerate(forms) if one == form]
        made, blocks = plugin.allocate(core, form, len(own), num_blocks)
        pairs.update(zip(own, made, strict=True))
        moved.append(blocks)
    joined = moved[0] if len(moved) == 1 else SeveralBlocks(moved)
    return [pairs[number] for number in range(len(forms))], joined


def _formats(graph: Graph, plugin: Plugin, spec: ArchSpec) -> list[CacheFormat]:
    """What each layer's caches are in one of the compiled graphs."""
    heads = {layer: spec.heads_of(layer) for layer in spec.cached_layers}
    return [
        cache_format(
            graph.compiled,
            (one.num_kv_heads, one.head_size),
            transposed_keys=plugin.transposed_keys,
            layer=layer,
        )
        for layer, one in heads.items()
    ]
