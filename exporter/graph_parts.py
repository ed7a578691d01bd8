"""What both graphs of a decoder have beside its layers: caches, RoPE tables, attributes."""

from __future__ import annotations

from onnx import TensorProto

from onnxport.exporter.plan import FINAL_NORM
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import contract as names
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import TensorRef


def attributes(spec: ArchSpec, layer: int) -> ops.AttentionAttributes:
    """Attention's attributes. The window counts the query's own token, as the spec's does."""
    return ops.AttentionAttributes(
        num_heads=spec.num_heads,
        kv_num_heads=spec.num_kv_heads,
        scale=spec.attention_scale,
        softcap=spec.attention_softcap,
        local_window_size=spec.sliding_window[layer],
        do_rotary=spec.rotates(layer),
        rotary_interleaved=spec.rope_of(layer).interleaved,
    )


def sinks(g: GraphBuilder, weights: StoredWeights, layer: int) -> str:
    """The attention sinks of a layer, if it has any."""
    stored = weights.vectors.get(f"layers.{layer}.sinks")
    return "" if stored is None else g.weight(stored)


def activation_dtype(weights: StoredWeights) -> int:
    """The element type of activations, which is that of the norms' weights."""
    return weights.vectors[FINAL_NORM].data_type


def declare_caches(
    g: GraphBuilder, spec: ArchSpec, dtype: int, past: list[int | str], present: list[int | str]
) -> None:
    """Declare the caches of all layers that have some, in and out."""
    for layer in spec.cached_layers:
        g.input(names.past_key(layer), dtype, past)
        g.input(names.past_value(layer), dtype, past)
        g.output(names.present_key(layer), dtype, present)
        g.output(names.present_value(layer), dtype, present)


def rope_tables(
    g: GraphBuilder, spec: ArchSpec, weights: StoredWeights, dtype: int
) -> list[tuple[str, str]]:
    """Each layer's cos and sin tables in the activations' type; empty names where nothing rotates.

    They are stored in float32, for long positions.
    """

    def table(ref: TensorRef) -> str:
        stored = g.weight(ref)
        if dtype == TensorProto.FLOAT:
            return stored
        return ops.cast(g, stored, dtype, f"{stored}.cast")

    tables = {rope: (table(cos), table(sin)) for rope, (cos, sin) in weights.ropes.items()}
    return [
        tables[spec.rope_of(layer)] if spec.rotates(layer) else ("", "")
        for layer in range(spec.num_layers)
    ]
