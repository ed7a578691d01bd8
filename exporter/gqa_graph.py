"""The graph that onnxruntime-genai's Generator runs."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from onnxport.exporter.decoder import Decoder
from onnxport.exporter.graph_parts import (
    activation_dtype,
    attributes,
    declare_rows_of_caches,
    rope_tables,
    sinks,
)
from onnxport.exporter.linear_batch import declare_rows, find_padding, mix_by_rows
from onnxport.exporter.linear_layer import (
    DeltaInputs,
)
from onnxport.exporter.rotation import positions_of_rows
from onnxport.exporter.short_conv import (
    ConvInputs,
    convolve_by_rows,
)
from onnxport.exporter.space_batch import scan_by_rows
from onnxport.exporter.space_layer import (
    Scanned,
    SpaceInputs,
)
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import attention_ops
from onnxport.graphs import contract as names
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.linear_spec import LinearAttentionSpec, StateSpaceSpec
from onnxport.graphs.spec import ArchSpec


def gqa_graph(spec: ArchSpec, weights: StoredWeights) -> onnx.ModelProto:
    """The graph of onnxruntime-genai's Generator: a batch, an attention mask, one cache each.

    There is none of attention of latents: its operator wants keys and values of every head. Nor of
    layers with other heads than others, or with the keys and values of others, for
    onnxruntime-genai knows one size of all caches, and one for each layer. Nor of experts with a
    GELU, which ONNX Runtime's own operators refuse.
    """
    assert spec.has_gqa_graph
    g = GraphBuilder("gqa")
    dtype = activation_dtype(weights)
    g.input(names.INPUT_IDS, TensorProto.INT64, [names.BATCH, "seq"])
    g.input(names.ATTENTION_MASK, TensorProto.INT64, [names.BATCH, "total_sequence_length"])
    g.output(names.LOGITS, TensorProto.FLOAT, [names.BATCH, "seq", spec.vocab_size])
    declare_rows_of_caches(g, spec, dtype)
    declare_rows(g, spec, dtype)
    tables = rope_tables(g, spec, weights, dtype)
    less_one, longest = attention_ops.gqa_sequence_lengths(g, names.ATTENTION_MASK)

    def attend(layer: int, qkv: str | tuple[str, ...]) -> str:
        cos, sin = tables[layer]
        return attention_ops.group_query_attention(
            g,
            qkv,
            names.past_key(layer),
            names.past_value(layer),
            (names.present_key(layer), names.present_value(layer)),
            sequence_lengths_minus_one=less_one,
            total_sequence_length=longest,
            attributes=attributes(spec, layer),
            cos=cos,
            sin=sin,
            sinks=sinks(g, weights, layer),
        )

    padding = None if spec.linear is None else find_padding(g, spec.linear)

    def mix(layer: int, inputs: DeltaInputs) -> str:
        assert isinstance(spec.linear, LinearAttentionSpec)
        assert padding is not None
        return mix_by_rows(g, spec.linear, dtype, padding, layer, inputs)

    def scan(layer: int, inputs: SpaceInputs) -> Scanned:
        assert isinstance(spec.linear, StateSpaceSpec)
        assert padding is not None
        return scan_by_rows(g, spec.linear, padding, layer, inputs)

    def convolve(layer: int, inputs: ConvInputs) -> str:
        assert padding is not None
        return convolve_by_rows(g, padding, layer, inputs)

    positions = positions_of_rows(g, spec, weights, less_one)
    decoder = Decoder(g, spec, weights, (0, 0), attend, mix, scan, convolve, positions)
    decoder.logits(decoder.body(None)[0])
    return g.build()
