"""What the Gemmas share: GELU, norms whose weights are stored less one, and a scaled embedding.

Embeddings are multiplied with the square root of their size. As in Granite, that goes into weights
that are there anyway: what the layers read of the residual stream are norms of it, so it may be
that of Gemma over this number. Then embeddings stay as they are, the norms of what layers add are
over it, and the epsilon of the norms that read the stream is over the square of it. Besides, the
stream, whose numbers are large in these models, is that much farther from the end of float16.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import TensorNames
from onnxport.graphs.spec import ArchSpec

GELU: Final = "gelu_pytorch_tanh"
TENSORS: Final = TensorNames(
    post_norm="pre_feedforward_layernorm.weight",
    o_norm="post_attention_layernorm.weight",
    down_norm="post_feedforward_layernorm.weight",
    norm_offset=1.0,
)


def gemma_spec(config: Config, **differences: Any) -> ArchSpec:
    """Gemma 2 and 3: heads of 256 and a tied head unless told otherwise.

    `differences` are keyword arguments of `decoder_spec`.
    """
    activation = config.get("hidden_activation", str, GELU)
    if activation != GELU:
        raise UnsupportedModelError(
            f"{config.path}: hidden_activation is {activation!r}; supported is {GELU!r}."
        )
    biased = config.get("attention_bias", bool, False)
    spec = decoder_spec(
        config,
        head_size=256,
        num_kv_heads=4,
        qkv_bias=biased,
        o_bias=biased,
        hidden_act="gelu_tanh",
        tied=True,
        **differences,
    )
    return replace(
        scaled_down(spec),
        inner_norm_eps=spec.rms_norm_eps,
        attention_scale=_query_scale(config),
        output_norms=True,
    )


def scaled_down(spec: ArchSpec) -> ArchSpec:
    """The spec with a stream that is Gemma's over the square root of its width."""
    return replace(
        spec,
        rms_norm_eps=spec.rms_norm_eps / spec.hidden_size,
        residual_scale=1 / math.sqrt(spec.hidden_size),
        stream_scale=math.sqrt(spec.hidden_size),
    )


def _query_scale(config: Config) -> float:
    scalar = config.get("query_pre_attn_scalar", float, 256.0)
    if not 0 < scalar < math.inf:
        raise CheckpointError(
            f"{config.path}: query_pre_attn_scalar is {scalar}; it must be above 0."
        )
    return 1 / math.sqrt(scalar)
