"""Fields that are accepted because they change nothing, and bodies that are refused whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from onnxport.errors import RequestError
from onnxport.serving.text import HALF, is_whole

ANY: object = object()  # every value is neutral: the field cannot change the result
LABELS = {
    "metadata": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_options": ANY,  # prompts that begin alike are always cached
    "prompt_cache_retention": ANY,
}
TIERS = ("auto", "default", "flex", "scale", "priority")  # OpenAI's; here there is one

# vLLM's: which requests go together, marks in texts, versions of weights that change while a server
# runs, what its router asks of it, and images.
OF_VLLM: Mapping[str, Any] = {
    "session_id": ANY,
    **{"watermarking": (False,), "return_weight_versions": (False,)},
    **{"return_token_offsets": (False,), "routed_experts_prompt_start": (0,)},
    **{"ec_transfer_params": ({},), "kv_transfer_params": ({},), "vllm_xargs": ({},)},
    **{"mm_payload": ("tensors",), "return_mm_kwargs": (True, False)},
}

MOST_FIELDS = 256  # of a body; no request has a third of them
MAX_DEPTH = 64  # of nested lists and objects
_PLAIN = {int, bool, type(None)}

# Field -> values that change nothing; null is always one of them.
NEUTRAL: Mapping[str, Any] = {
    **LABELS,
    "store": (False,),
    "service_tier": TIERS,
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True, False),  # of slow tokenizers alone
    "guided_decoding_backend": ("auto", "guidance"),
    "structural_tag": (),
    **{"min_keep": (0, 1), "t_max_predict_ms": (0, -1)},  # llama.cpp's, as what follows
    **{"return_tokens": (False,), "post_sampling_probs": (False,), "verbose": (False,)},
    "backend_sampling": ANY,  # of speed alone
    **dict.fromkeys(("speculative.n_max", "speculative.n_min", "speculative.p_min"), ANY),
    "detokenize": (True,),
    **OF_VLLM,
}
# vLLM's and llama.cpp's, of APIs that are turned into chats and completions, which may obey more.
OF_ENGINES: Mapping[str, Any] = {
    **{"length_penalty": (1,), "use_beam_search": (False,), "logits_processors": ([],)},
    **{"spaces_between_special_tokens": (True, False), "detokenize": (True,)},
    **OF_VLLM,
    "min_keep": (0, 1),
    **{"cache_prompt": (True,), "id_slot": (-1,), "n_probs": (0,)},
    "return_progress": (False,),
}
NEUTRAL_CHAT: Mapping[str, Any] = {
    **NEUTRAL,
    "modalities": (["text"],),
    "audio": (),
    "prediction": ANY,  # of speed alone
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "chat_template": (),
    "parse_tool_calls": (True,),
    "media_io_kwargs": ANY,  # of images and sounds, which are refused
    "mm_processor_kwargs": ANY,
}
ADVICE: Mapping[str, str] = {  # what else has the effect
    "min_keep": "top_k and top_p may keep more",
    "t_max_predict_ms": "max_tokens and timeout_s limit an answer",
    "return_tokens": "return_token_ids tells them",
    "verbose": "return_token_ids, and /apply-template, tell what the model was given",
    "post_sampling_probs": "a server has them with --logprobs-mode processed_logprobs",
}
NEUTRAL_COMPLETION: Mapping[str, Any] = {**NEUTRAL, "prompt_embeds": ()}


def check_neutral(body: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    """Raise RequestError for a field of `neutral` whose value would change something."""
    for name, allowed in neutral.items():
        if name in body and not _is_neutral(body[name], allowed):
            raise RequestError(_refusal(name, body[name], allowed), name)


def check_json(body: dict[str, Any]) -> None:
    """Refuse what is read as JSON and cannot be written: halves of characters, NaN, deep nests.

    Raises:
        RequestError: names the field.
    """
    if len(body) > MOST_FIELDS:
        raise RequestError(f"the body has {len(body)} fields; requests have {MOST_FIELDS} at most")
    for name, field in body.items():
        level: list[Any] = [name, field]
        for _ in range(MAX_DEPTH):
            for each in level:
                if isinstance(each, str) and not is_whole(each):
                    raise RequestError(f"a text {HALF}", None if each is name else name)
                if isinstance(each, float) and not math.isfinite(each):
                    raise RequestError(
                        f"{name} is or holds {each}, which is no number of JSON; send finite ones",
                        name,
                    )
            nests = [each for each in level if isinstance(each, dict | list)]
            nests = [nest for nest in nests if not _is_plain(nest)]
            level = [each for nest in nests for each in nest]
            level += [each for nest in nests if isinstance(nest, dict) for each in nest.values()]
            if not level:
                break
        else:
            raise RequestError(
                f"{name} is nested more than {MAX_DEPTH} levels deep; send something flatter", name
            )


def is_list(value: Any, kind: type) -> bool:
    """Whether this is a list of this very type; what pydantic would do in seconds for a million."""
    return isinstance(value, list) and set(map(type, value)) <= {kind}


def are_ids(value: Any) -> bool:
    """Whether this is a list of numbers that may be tokens."""
    return is_list(value, int) and (not value or (min(value) >= 0 and max(value) < 2**31))


def _is_plain(nest: dict[str, Any] | list[Any]) -> bool:
    """Whether this is a list of numbers or texts, which may be long, with nothing to look for."""
    if not isinstance(nest, list):
        return False
    kinds = set(map(type, nest))
    if kinds == {str}:
        return is_whole("".join(nest))
    if kinds == {float}:
        return all(map(math.isfinite, nest))
    return kinds <= _PLAIN


def _is_neutral(value: Any, allowed: Any) -> bool:
    """Whether `value` changes nothing; true and 1 are told apart, and null members say nothing."""
    if value is None or allowed is ANY:
        return True
    if isinstance(value, dict):
        value = {name: each for name, each in value.items() if each is not None}
    same_kind = (one for one in allowed if isinstance(one, bool) == isinstance(value, bool))
    return any(value == one for one in same_kind)


def _refusal(name: str, value: Any, allowed: Any) -> str:
    """Return what to tell a client about a value that is not supported."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    values = " or ".join(["null", *(repr(one) for one in allowed)])
    advice = f" ({ADVICE[name]})" if name in ADVICE else ""
    return f"{name} is {shown}, which is not supported yet; send {values}, or leave it out{advice}"
