"""Give each group of layers a block table of its own.

Layers with a sliding window can do without the blocks behind it, if those are not the blocks of
layers that see all: see `graphs.cache_groups`. Before `set_kv_dtype`, `keep_native` and
`decompose`.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto

from onnxport.errors import ArtifactError
from onnxport.graphs import contract
from onnxport.graphs.cache_groups import LayerGroups
from onnxport.graphs.paged import (
    PagedAttentionNode,
    PagedInput,
    attention_nodes,
    is_paged_attention,
)
from onnxport.graphs.passes.result import PassResult, copy_model


def group_tables(model: onnx.ModelProto, groups: LayerGroups) -> PassResult:
    """Let each PagedAttention read the block table of its layer's group.

    The graph gets an input `contract.block_table(group)`, shaped as BLOCK_TABLE, for each group but
    the first, which keeps that one. A single group changes nothing.

    Args:
        model: A paged graph whose PagedAttention nodes are still there.
        groups: Of its layers.

    Raises:
        ArtifactError: Its layers are not those of `groups`, do not all read BLOCK_TABLE and write
            by it, or see more than the window of their group.
    """
    if groups == LayerGroups.single(len(groups.places)):
        return PassResult("group_tables", model, {})
    numbers = _layer_numbers(attention_nodes(model), groups)
    if len(groups.windows) == 1:
        return PassResult("group_tables", model, {})
    copy = copy_model(model)
    changed = 0
    for node in (node for node in copy.graph.node if is_paged_attention(node)):
        group, _ = groups.places[numbers[node.input[PagedInput.KEY_CACHE]]]
        node.input[PagedInput.BLOCK_TABLE] = contract.block_table(group)
        changed += group > 0
    for group in range(1, len(groups.windows)):
        dims = [contract.BATCH, contract.MAX_NUM_BLOCKS]
        name = contract.block_table(group)
        copy.graph.input.append(onnx.helper.make_tensor_value_info(name, TensorProto.INT32, dims))
    return PassResult("group_tables", copy, {"layers with a block table of their group": changed})


def _layer_numbers(layers: Sequence[PagedAttentionNode], groups: LayerGroups) -> dict[str, int]:
    """The places among layers with a cache, by their key caches' names, once all fit the groups.

    Names are those of inputs and outputs. Between such layers there may be others, without a cache.
    """
    count = len(groups.places)
    found = [layer.input(PagedInput.KEY_CACHE) for layer in layers]
    own = [name for name, layer in zip(found, layers, strict=True) if layer.writes]
    parts = [name.split(".") for name in own]
    layer_numbers = sorted({int(part[1]) for part in parts if part[1:2] and part[1].isdecimal()})
    numbers = {contract.past_key(layer): place for place, layer in enumerate(layer_numbers)}
    is_whole = sorted(own) == sorted(numbers) and len(own) == count
    # What reads the keys and values of another layer finds them by that layer's table.
    numbers |= {contract.present_key(layer): place for place, layer in enumerate(layer_numbers)}
    if not is_whole or not numbers.keys() >= {*found}:
        raise ArtifactError(
            f"group_tables: groups are of {count} layers, whose PagedAttention nodes read "
            f"{contract.past_key(0)} and so on; the graph's read {found}"
        )
    for layer, name in zip(layers, found, strict=True):
        table = layer.input(PagedInput.BLOCK_TABLE)
        if table != contract.BLOCK_TABLE or layer.input(PagedInput.SLOT_MAPPING):
            raise ArtifactError(
                f"group_tables: {layer.name!r} must find its blocks by {contract.BLOCK_TABLE} "
                f"alone; it reads {table!r}, and the slots "
                f"{layer.input(PagedInput.SLOT_MAPPING) or 'of no input'}"
            )
        seen, kept = layer.local_window_size, groups.windows[groups.places[numbers[name]][0]]
        if kept is not None and (seen is None or seen > kept):
            raise ArtifactError(
                f"group_tables: a query of {layer.name!r} sees {seen or 'all'} tokens, and its "
                f"group keeps {kept}; layers of a group see no more than its window"
            )
    return numbers
