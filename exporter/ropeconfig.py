"""RoPE parameters from `config.json`, in both the old and the transformers 5 spelling.

Old: `rope_theta`, `partial_rotary_factor` and `rope_scaling` (with `type` or `rope_type`) at the
top. New: `rope_parameters`, which holds all of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.graphs.rope_spec import ROPE_PARAMETERS, RopeSpec

if TYPE_CHECKING:
    from onnxport.exporter.config import Config

D = TypeVar("D")

logger = logging.getLogger(__name__)

_COMMON: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})

_POSITIVE: Final = frozenset(
    {
        *("rope_theta", "factor", "original_max_position_embeddings", "attn_factor"),
        *("short_factor", "long_factor"),
    }
)

# RoPE type -> the keys it may have besides the common ones.
ROPE_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "attn_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",  # says how the weights came to be; nothing reads it
        }
    ),
    "longrope": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "short_factor",
            "long_factor",
        }
    ),
    "proportional": frozenset({"factor"}),
}
_ALIASES: Final = {"su": "longrope"}  # what the first Phi-3 called it


def read_rope(
    config: Config,
    head_size: int,
    context_length: int | None,
    defaults: Mapping[str, float] | None = None,
) -> tuple[RopeSpec, int]:
    """Read the RoPE parameters and settle the context length, in tokens.

    The context length is `max_position_embeddings` unless given. A longer one is refused, for the
    model was not made for it, except where the RoPE type defines what it means: yarn up to factor
    times its original length, and dynamic (see `rope.inverse_frequencies`) without limit.

    Args:
        config: The model's configuration.
        head_size: Channels of a head.
        context_length: What was asked for; None: the model's own.
        defaults: Parameters where the configuration does not give them.

    Raises:
        UnsupportedModelError: A RoPE type or key that is not known, or too long a context.
        CheckpointError: A parameter is missing, of a wrong type, or contradicts another.
    """
    return rope_from(
        config, {**(defaults or {}), **rope_parameters(config)}, head_size, context_length
    )


def rope_from(
    config: Config,
    values: Mapping[str, Any],
    head_size: int,
    context_length: int | None,
    *,
    proportional: bool = False,
) -> tuple[RopeSpec, int]:
    """What `read_rope` does, with RoPE keys in the new spelling, without nulls.

    The type `proportional` is that of a few families, and others have it refused.
    """
    kind = _kind(values)
    supported = [one for one in ROPE_KEYS if proportional or one != "proportional"]
    if kind not in supported:
        raise UnsupportedModelError(
            f"{config.path}: the RoPE type {kind!r} is not supported; supported are "
            f"{', '.join(supported)}."
        )
    unknown = sorted(set(values) - ROPE_KEYS[kind] - _COMMON)
    if unknown:
        raise UnsupportedModelError(
            f"{config.path}: the RoPE type {kind!r} has keys that are not understood: "
            f"{', '.join(f'{key} = {values[key]!r}' for key in unknown)}."
        )
    trained = config.require("max_position_embeddings", int)
    fields = _fields(config, kind, values, trained)
    partial = _number(config, values, "partial_rotary_factor", 1.0)
    if kind == "longrope":
        longest = trained if context_length is None else context_length
        fields["factors"] = _factors(config, values, longest > fields["original_context_length"])
    rotary_dim = int(head_size * partial)
    if kind == "proportional":
        fields["factor"] = _number(config, values, "factor", 1.0)
        fields["rotated_pairs"], rotary_dim = int(partial * head_size // 2), head_size
    try:
        rope = RopeSpec(
            type=kind,
            theta=_number(config, values, "rope_theta", 10_000.0),
            rotary_dim=rotary_dim,
            **fields,
        )
    except ValueError as error:
        raise CheckpointError(f"{config.path}: RoPE parameters: {error}.") from error
    return rope, _context_length(config, rope, trained, context_length)


def rope_by_layer_type(
    config: Config, defaults: Mapping[str, Mapping[str, Any]], scaled: str
) -> dict[str, dict[str, Any]]:
    """RoPE keys of each layer type, which `rope_parameters` holds; for `rope_from`.

    Args:
        config: The model's configuration.
        defaults: By layer type, what holds where `rope_parameters` does not say.
        scaled: The layer type that the old spelling's `rope_scaling` is about.

    Raises:
        UnsupportedModelError: Another layer type, or both spellings, which differ.
    """
    nested = _without_nulls(config.get("rope_parameters", dict, {}))
    if not all(kind in defaults and isinstance(one, dict) for kind, one in nested.items()):
        raise UnsupportedModelError(
            f"{config.path}: rope_parameters is {nested}; supported is an object for each of the "
            f"layer types {', '.join(defaults)}."
        )
    given = {kind: _without_nulls(nested.get(kind, {})) for kind in defaults}
    scaling = _without_nulls(config.get("rope_scaling", dict, {}))
    if _differ(scaling, given[scaled], defaults[scaled], None):
        raise UnsupportedModelError(
            f"{config.path} has rope_scaling = {scaling} and rope_parameters = {given[scaled]} for "
            f"{scaled}, which differ; remove the one that the model was not trained with."
        )
    given[scaled] = {**given[scaled], **scaling}
    return {kind: {**defaults[kind], **one} for kind, one in given.items()}


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _kind(values: Mapping[str, Any]) -> str:
    """The type, by the name that is known here."""
    kind = str(values.get("rope_type", values.get("type", "default")))
    return _ALIASES.get(kind, kind)


def _factors(config: Config, values: Mapping[str, Any], is_long: bool) -> tuple[float, ...]:
    """LongRoPE's factors: the long ones where the context is longer than the original one."""
    name = "long_factor" if is_long else "short_factor"
    found = values.get(name)
    if not isinstance(found, list) or not found:
        raise CheckpointError(
            f"{config.path}: the RoPE key {name!r} is {found!r}; longrope needs a list of numbers."
        )
    return tuple(_number(config, {name: one}, name, 0.0) for one in found)


def rope_parameters(config: Config) -> dict[str, Any]:
    """All RoPE keys in the new spelling; nulls left out."""
    values: dict[str, Any] = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        found = config.get(key, float, None)
        if found is not None:
            values[key] = found
    original = config.get("original_max_position_embeddings", int, None)
    outer = dict(values)
    given: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        nested = config.get(key, dict, None) or {}
        if any(isinstance(value, dict) for value in nested.values()):
            raise UnsupportedModelError(
                f"{config.path}: {key} differs between layer types, which is not supported."
            )
        told = _without_nulls(nested)
        kind = told.get("rope_type", told.get("type"))
        if kind == "yarn" and nested.get("truncate", True) is None:
            told["truncate"] = False  # as transformers reads it
        if _differ(given, told, outer, config.get("max_position_embeddings", int, None)):
            raise UnsupportedModelError(
                f"{config.path} has rope_scaling = {given} and rope_parameters = {told}, which "
                "differ; remove the one that the model was not trained with."
            )
        values.update(told)
        given = told
    kind = _kind(values)
    if original is not None and "original_max_position_embeddings" in ROPE_KEYS.get(kind, ()):
        values["original_max_position_embeddings"] = original  # the outer one wins
    return values


def inner_rope(config: Config, key: str) -> Any:
    """What `rope_parameters` or `rope_scaling` itself says of a key; None: nothing."""
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name, dict, {}).get(key)
        if found is not None:
            return found
    return None


def check_outer(config: Config, key: str, computed: Any) -> None:
    """Refuse a RoPE key at the top that transformers leaves out, unless it says what holds anyway.

    Raises:
        CheckpointError: It says something else than `computed`.
    """
    if (found := config.get(key, float, computed)) != computed:
        raise CheckpointError(
            f"{config.path}: {key} is {found}, which transformers does not read here: it computes "
            f"with {computed}. Remove it, or give rope_parameters what the model was trained with."
        )


def _differ(
    scaling: Mapping[str, Any],
    parameters: Mapping[str, Any],
    outer: Mapping[str, Any],
    trained: int | None,
) -> bool:
    """Whether the old and the new spelling are both there, and say different things.

    Args:
        scaling: the old spelling.
        parameters: the new one.
        outer: what holds for both where they do not say.
        trained: the context length, likewise.
    """

    def told(values: Mapping[str, Any]) -> dict[str, Any]:
        kind = _kind(values)
        ignored = {"rope_type", "type", "finetuned"}
        found = {key: one for key, one in values.items() if key not in ignored}
        for name, default in (("rope_theta", 10_000.0), ("partial_rotary_factor", 1.0)):
            found.setdefault(name, outer.get(name, default))
        if "original_max_position_embeddings" in ROPE_KEYS.get(kind, ()):
            found.setdefault("original_max_position_embeddings", trained)
        return {"type": kind} | found

    return bool(scaling) and bool(parameters) and told(scaling) != told(parameters)


def _fields(config: Config, kind: str, values: Mapping[str, Any], trained: int) -> dict[str, Any]:
    """The RopeSpec fields that the type `kind` needs."""
    original = int(_number(config, values, "original_max_position_embeddings", trained))
    if kind == "dynamic" and original != trained:
        raise UnsupportedModelError(
            f"{config.path}: dynamic RoPE with original_max_position_embeddings = {original} and "
            f"max_position_embeddings = {trained}; only equal values have a defined meaning."
        )
    factor = _number(config, values, "factor", trained / original if kind == "yarn" else None)
    found: dict[str, Any] = {"factor": factor, "original_context_length": original}
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            found[name] = _number(config, values, name, None)
        low, high = found["low_freq_factor"], found["high_freq_factor"]
        if low is not None and high is not None and high < low:
            raise CheckpointError(
                f"{config.path}: high_freq_factor is {high} and low_freq_factor {low}; the first "
                "must not be smaller."
            )
    if kind == "yarn":
        assert factor is not None
        if _number(config, values, "rope_theta", 10_000.0) <= 1:
            raise CheckpointError(f"{config.path}: yarn needs a rope_theta above 1.")
        found["beta_fast"] = _number(config, values, "beta_fast", None) or 32.0
        found["beta_slow"] = _number(config, values, "beta_slow", None) or 1.0
        found["truncate"] = bool(values.get("truncate", True))
        found["attention_factor"] = _attention_factor(config, values, factor)
    if kind == "longrope":
        if "original_max_position_embeddings" not in values:
            raise CheckpointError(
                f"{config.path} lacks original_max_position_embeddings, which longrope needs."
            )
        extension = _number(config, values, "factor", trained / original)
        given = _number(config, values, "attention_factor", None)
        found["attention_factor"] = _long_magnitude(extension, original) if given is None else given
    allowed = {*ROPE_PARAMETERS[kind], "attention_factor"}
    return {name: value for name, value in found.items() if name in allowed}


def _attention_factor(config: Config, values: Mapping[str, Any], factor: float) -> float:
    """Yarn's scale of cos and sin: given, or 0.1 m ln(factor) + 1 (arXiv:2309.00071, §3.4).

    With both mscale and mscale_all_dim it is the ratio of theirs (DeepSeek-V2). `attn_factor`
    multiplies it, as vLLM and llama.cpp have it: DeepSeek-R1-0528-Qwen3-8B takes it back by that.
    """
    given = _number(config, values, "attention_factor", None)
    more = _number(config, values, "attn_factor", None)
    if given is not None and more is not None:
        raise CheckpointError(
            f"{config.path}: the RoPE keys attention_factor = {given} and attn_factor = {more} are "
            "both there; remove the one that the model was not trained with."
        )
    if given is not None:
        return given
    if more is not None:
        logger.warning(
            "attn_factor = %s multiplies the RoPE's magnitude, as in vLLM and llama.cpp; "
            "transformers leaves it out, so its logits differ",
            more,
        )

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    numerator = _number(config, values, "mscale", None)
    denominator = _number(config, values, "mscale_all_dim", None)
    found = magnitude(1.0)
    if numerator and denominator:
        found = magnitude(numerator) / magnitude(denominator)
    return found if more is None else found * more


def _long_magnitude(factor: float, original: int) -> float:
    """LongRoPE's scale of cos and sin (arXiv:2402.13753, as Phi-3 has it)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _number(config: Config, values: Mapping[str, Any], key: str, default: D) -> float | D:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{config.path}: the RoPE key {key!r} is {value!r}, not a number.")
    if not math.isfinite(value) or (value <= 0 and key in _POSITIVE):
        raise CheckpointError(f"{config.path}: the RoPE key {key!r} is {value!r}, out of range.")
    return float(value)


def _context_length(config: Config, rope: RopeSpec, trained: int, asked: int | None) -> int:
    if asked is None or asked == trained or (asked > 0 and rope.type == "dynamic"):
        return asked or trained
    longest = trained
    if rope.type == "yarn":
        assert rope.factor is not None
        assert rope.original_context_length is not None
        longest = max(trained, int(rope.factor * rope.original_context_length))
    if not 0 < asked <= longest:
        raise UnsupportedModelError(
            f"a context length of {asked} tokens was asked for; this model was made for {longest} "
            f"({config.path}). Choose one from 1 to {longest}."
        )
    return asked
