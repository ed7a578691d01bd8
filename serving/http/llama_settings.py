"""How a completion is made, told as llama.cpp's server tells it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onnxport.serving.http.llama_cpp import ADAPTIVE, INFILL, SAMPLED, SAMPLERS
from onnxport.serving.params import SamplingParams


def sampling_settings(params: SamplingParams) -> dict[str, Any]:
    """Return how tokens are chosen, by llama.cpp's names; what means nothing here is left out.

    Source of these: https://github.com/ggml-org/llama.cpp/tree/master/tools/server.
    """
    last_n = params.repeat_last_n
    more = {INFILL: params.infill, ADAPTIVE: params.adaptive_target is not None}
    return {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "max_tokens": -1 if params.max_tokens is None else params.max_tokens,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k or 0,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        **{name: getattr(params, name) for name in SAMPLED},
        "repeat_last_n": -1 if last_n is None else last_n,
        "adaptive_target": -1.0 if params.adaptive_target is None else params.adaptive_target,
        "samplers": (*SAMPLERS, *(name for name, is_on in more.items() if is_on)),
    }


def generation_settings(params: SamplingParams, *, stream: bool) -> dict[str, Any]:
    """Return all that one completion was asked for, the server's defaults included.

    Args:
        params: of the completion.
        stream: whether it was told piece by piece.
    """
    biases = params.logit_bias
    form = params.structured_outputs
    return {
        **sampling_settings(params),
        "stop": params.stop,
        "ignore_eos": params.ignore_eos,
        "logit_bias": [
            {"token": token_id, "bias": bias if math.isfinite(bias) else None}
            for token_id, bias in (biases.items() if isinstance(biases, Mapping) else biases)
        ],
        "n_probs": params.logprobs or 0,
        "min_tokens": params.min_tokens,
        "grammar": (form.grammar if form else None) or "",
        "stream": stream,
    }


def choose(answer: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of an answer that `response_fields` names, by these names.

    A name may lead into an object, as in generation_settings/n_predict. What is not there is left
    out, as llama.cpp's server does.

    Args:
        answer: all of it.
        names: of fields; without any, all are told.
    """
    if not names:
        return dict(answer)
    chosen: dict[str, Any] = {}
    for name in names:
        found: Any = answer
        for part in name.split("/"):
            if not isinstance(found, Mapping) or part not in found:
                break
            found = found[part]
        else:
            chosen[name] = found
    return chosen
