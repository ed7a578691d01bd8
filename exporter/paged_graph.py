"""The paged graph of the contract, which onnxport serves."""

from __future__ import annotations

from functools import partial

import onnx
from onnx import TensorProto

from onnxport.exporter.decoder import Decoder
from onnxport.exporter.draft_inputs import declare_states
from onnxport.exporter.graph_parts import (
    activation_dtype,
    attributes,
    declare_pools,
    rope_tables,
    sinks,
)
from onnxport.exporter.linear_layer import (
    DeltaInputs,
    declare_slots,
    mix_by_slots,
)
from onnxport.exporter.rotation import positions_of_tokens
from onnxport.exporter.short_conv import (
    convolve_by_slots,
)
from onnxport.exporter.space_layer import (
    Scanned,
    SpaceInputs,
    scan_by_slots,
)
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import attention_ops
from onnxport.graphs import contract as names
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.linear_spec import LinearAttentionSpec, StateSpaceSpec
from onnxport.graphs.spec import ArchSpec


def paged_graph(spec: ArchSpec, weights: StoredWeights) -> onnx.ModelProto:
    """The paged graph of the contract: packed sequences, block tables, caches in place."""
    g = GraphBuilder("paged")
    dtype = activation_dtype(weights)
    g.input(names.INPUT_IDS, TensorProto.INT64, [names.NUM_TOKENS])
    int32_inputs: tuple[tuple[str, list[int | str]], ...] = (
        (names.BLOCK_TABLE, [names.BATCH, names.MAX_NUM_BLOCKS]),
        (names.CUMULATIVE_SEQUENCE_LENGTHS, [names.BATCH_PLUS_ONE]),
        (names.PAST_SEQUENCE_LENGTHS, [names.BATCH]),
        (names.ATTENTION_METADATA, [3]),
        (names.LOGITS_INDICES, [names.NUM_LOGITS]),
    )
    for name, dims in int32_inputs:
        g.input(name, TensorProto.INT32, dims)
    g.output(names.LOGITS, TensorProto.FLOAT, [names.NUM_LOGITS, spec.num_logits])
    if spec.draft is not None:
        declare_states(g, spec.draft, spec.hidden_size)
    declare_pools(g, spec, dtype)
    declare_slots(g, spec, dtype)
    tables = rope_tables(g, spec, weights, dtype)

    def attend(layer: int, qkv: str | tuple[str, ...]) -> str:
        cos, sin = tables[layer]
        source = spec.kv_source(layer)
        caches = names.cache_names(source, spec.cache_parts)
        if source != layer:
            caches = tuple((present, "") for _, present in caches)
        return attention_ops.paged_attention(
            g,
            qkv,
            caches,
            cumulative_sequence_lengths=names.CUMULATIVE_SEQUENCE_LENGTHS,
            past_sequence_lengths=names.PAST_SEQUENCE_LENGTHS,
            block_table=names.BLOCK_TABLE,
            attention_metadata=names.ATTENTION_METADATA,
            attributes=attributes(spec, layer),
            cos=cos,
            sin=sin,
            sinks=sinks(g, weights, layer),
        )

    def select(x: str) -> str:
        return g.node("Gather", [x, names.LOGITS_INDICES], name="select", axis=0)

    positions = positions_of_tokens(g, spec, weights)

    def mix(layer: int, inputs: DeltaInputs) -> str:
        assert isinstance(spec.linear, LinearAttentionSpec)
        return mix_by_slots(g, spec.linear, layer, inputs)

    def scan(layer: int, inputs: SpaceInputs) -> Scanned:
        assert isinstance(spec.linear, StateSpaceSpec)
        return scan_by_slots(g, spec.linear, dtype, layer, inputs)

    ways = (mix, scan, partial(convolve_by_slots, g))
    decoder = Decoder(g, spec, weights, (0,), attend, *ways, positions)
    normed, hidden = decoder.body(select)
    decoder.logits(normed)
    if spec.draft is not None:
        told = normed if spec.draft.norm_output else hidden
        last = names.LAST_HIDDEN_STATES
        g.node("Cast", [told], outputs=[last], name="last.cast", to=TensorProto.FLOAT)
    return g.build()
