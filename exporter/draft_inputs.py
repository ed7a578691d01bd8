"""What only a draft head's graph has: the states that go in, and those that come out."""

from __future__ import annotations

from onnx import TensorProto

from onnxport.exporter.plan import EMBEDDING_NORM, STATE_NORM
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import contract as names
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.draft_spec import DraftSpec


def declare_states(g: GraphBuilder, draft: DraftSpec, hidden: int) -> None:
    """Declare the inputs and the output, all of them float32; `hidden` is the head's own width."""
    kind = TensorProto.FLOAT
    g.input(names.TARGET_HIDDEN_STATES, kind, [names.NUM_TOKENS, draft.features])
    g.input(names.DRAFT_HIDDEN_STATES, kind, [names.NUM_TOKENS, hidden])
    g.output(names.LAST_HIDDEN_STATES, kind, [names.NUM_LOGITS, hidden])


def normed_features(
    g: GraphBuilder, draft: DraftSpec, weights: StoredWeights, dtype: int, epsilon: float
) -> str:
    """The model's states, [num_tokens, features] of `dtype`, normalized if the head does that.

    A row of zeros stays one.
    """
    features = ops.cast(g, names.TARGET_HIDDEN_STATES, dtype, "features.cast")
    if draft.joint_norm:
        return ops.rms_norm(g, features, g.weight(weights.vectors["joint_norm"]), epsilon, "joint")
    if not draft.apart_norm:
        return features
    count = len(draft.target_layers)
    parts = g.node(
        "Split", [features], outputs=count, name="features.split", axis=-1, num_outputs=count
    )
    normed = [
        ops.rms_norm(g, part, g.weight(weights.vectors[f"apart_norm.{place}"]), epsilon, "apart")
        for place, part in enumerate(parts)
    ]
    return g.node("Concat", normed, name="features.join", axis=-1)


def token_and_state(
    g: GraphBuilder, weights: StoredWeights, embedded: str, state: str, epsilon: float
) -> str:
    """What the product of multi-token prediction reads, [num_tokens, 2 * hidden], both normed."""
    normed = [
        ops.rms_norm(g, value, g.weight(weights.vectors[role]), epsilon, role)
        for value, role in ((embedded, EMBEDDING_NORM), (state, STATE_NORM))
    ]
    return g.node("Concat", normed, name="token_and_state", axis=-1)
