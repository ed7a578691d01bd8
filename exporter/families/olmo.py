"""OLMo 1: Llama with LayerNorms that have no weights, and a bound on queries, keys and values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.graphs.spec import ArchSpec

_EPSILON: Final = "layer_norm_eps"
_ITS_VALUE: Final = 1e-5  # whatever a file says; most say nothing


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """OLMo: optional biases on attention projections; `clip_qkv` is null in the 1B."""
    bound = config.get("clip_qkv", float, None)
    if bound is not None and not 0 < bound < math.inf:
        raise CheckpointError(
            f"{config.path}: clip_qkv is {bound}; it is null, or a bound above 0 on queries, keys "
            "and values."
        )
    epsilon = config.get(_EPSILON, float, _ITS_VALUE)
    if not math.isclose(epsilon, _ITS_VALUE, rel_tol=1e-6):
        raise UnsupportedModelError(
            f"{config.path}: {_EPSILON} is {epsilon}; supported is {_ITS_VALUE}, which is what "
            "transformers computes for this family. Remove it if the model has that."
        )
    biased = config.get("attention_bias", bool, False)
    spec = decoder_spec(
        config.replaced(**{_EPSILON: _ITS_VALUE}),
        family="olmo",
        qkv_bias=biased,
        o_bias=biased,
        context_length=context_length,
        epsilon=_EPSILON,
    )
    return replace(spec, layer_norms=True, qkv_bound=bound)


FAMILY: Final = Family(
    name="olmo",
    architecture="OlmoForCausalLM",
    spec=read_spec,
    tensors=TensorNames(plain_norms=True),
)
