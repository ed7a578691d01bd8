"""What vLLM's users write in its speculative config, in terms of ours."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from onnxport.errors import ArtifactError, CapacityError

logger = logging.getLogger(__name__)

_OLDER_NAMES: Final = (  # where it means the layers of one family
    *("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"),
    *("qwen3_5_mtp", "qwen3_next_mtp"),
)
_ON_A_GPU: Final = "ngram_gpu"
_LOOKED_UP: Final = ("ngram", "[ngram]")  # in place of a model
_SYNTHETIC: Final = "a guess stays where it is what the model says, and no other does; leave it out"
_DRAFT_EXPORT: Final = "what a draft model is, its export decides; give its artifact as model"
_NOT_SERVED: Final = "heads that need it are not served; see docs/speculation.md for those that are"
_ONE_DEVICE: Final = "a draft model runs on one device; leave it out"

# Key -> values that change nothing, null always one of them; and what to do instead of others. Of
# speed alone are those that take any.
_ANY: Final = object()
_LEFT_OUT: Final[Mapping[str, tuple[Any, str]]] = {
    **dict.fromkeys(("draft_tensor_parallel_size", "tensor_parallel_size"), ((1,), _ONE_DEVICE)),
    **dict.fromkeys(("quantization", "draft_load_config"), ((), _DRAFT_EXPORT)),
    **dict.fromkeys(("revision", "code_revision"), ((), _DRAFT_EXPORT)),
    "enforce_eager": ((False,), "--no-capture-graphs says so of all models; leave it out"),
    "draft_lm_head_quantization": ((), "a head is exported with --head-precision; leave it out"),
    **dict.fromkeys(
        ("attention_backend", "moe_backend"), (("auto",), "the provider chooses; leave it out")
    ),
    "parallel_drafting": ((False,), _NOT_SERVED),
    "enable_adaptive_verification": (
        (False,),
        "how many guesses are checked is chosen by what is measured, always; leave it out",
    ),
    "use_heterogeneous_vocab": ((False,), "take a draft model with the model's own tokenizer"),
    "rejection_sample_method": (("standard",), _SYNTHETIC),
    "draft_sample_method": (
        ("probabilistic",),
        "a draft model draws as the request does, by the same random number; leave it out",
    ),
    **dict.fromkeys(
        ("synthetic_acceptance_rates", "synthetic_acceptance_length"), ((), _SYNTHETIC)
    ),
    **dict.fromkeys(
        ("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"), ((), _SYNTHETIC)
    ),
    **dict.fromkeys(("dspark_draft_topk", "xpress_topc"), ((), _NOT_SERVED)),
    "index_share_for_mtp_iteration": ((), _DRAFT_EXPORT),
    **dict.fromkeys(
        ("disable_padded_drafter_batch", "disable_eagle_block_drop"), (_ANY, "leave it out")
    ),
    **dict.fromkeys(
        ("disable_lookahead_block_hashes", "use_local_argmax_reduction"), (_ANY, "leave it out")
    ),
}


def understood(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a speculative config with vLLM's ways to say a thing put in ours.

    Args:
        given: keys and values. A method may be missing where a model tells which it is.

    Raises:
        CapacityError: a key of vLLM's has a value that cannot be obeyed.
    """
    config = {key: value for key, value in given.items() if not _is_neutral(key, value)}
    model = config.get("model")
    if config.get("method") is None and isinstance(model, str | Path):
        config["method"] = _method_of(model)
    method = config.get("method")
    if method in _OLDER_NAMES:
        logger.warning("the speculation method %s is called mtp", method)
        config["method"] = "mtp"
    if method == _ON_A_GPU:
        logger.warning("the speculation method %s is ngram here, on the host", method)
        config["method"] = "ngram"
    if config.get("method") == "ngram" and model in (*_LOOKED_UP, _ON_A_GPU):
        del config["model"]  # which only says the same
    return config


def _is_neutral(key: str, value: Any) -> bool:
    """Whether a key is one of vLLM's, and its value changes nothing; others are refused."""
    if key not in _LEFT_OUT:
        return False
    values, instead = _LEFT_OUT[key]
    same = value is None or values is _ANY
    if not same and not any(type(value) is type(one) and value == one for one in values):
        allowed = " or ".join([*map(repr, values), "null"])
        raise CapacityError(f"{key} is {value!r}; here it may be {allowed}: {instead}")
    return True


def _method_of(model: str | Path) -> str:
    """Return the method that a model is for, by what it is."""
    from onnxport.graphs.artifact import Artifact

    if model in _LOOKED_UP:
        return "ngram"
    try:
        head = Artifact.read(Path(model), check_graphs=False).manifest.model.draft
    except ArtifactError:
        head = None  # which is told when it is loaded
    found = "draft_model" if head is None else head.method
    logger.info("the speculation method is %s, by what %s is", found, model)
    return found
