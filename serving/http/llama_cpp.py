"""Fields of llama.cpp's server: OpenAI's and vLLM's by other names, and how it samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import Field

from onnxport.errors import RequestError
from onnxport.serving.http.forms import FormFields
from onnxport.serving.http.strict import Strict
from onnxport.serving.param_ranges import MAX_SCALE
from onnxport.serving.params import SamplingParams

SAMPLED: Final = (  # what the engine has by the same names
    *("top_n_sigma", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("repeat_last_n", "adaptive_target", "adaptive_decay"),
)
CALLED: Final[Mapping[str, str]] = {  # what it calls fields of ours
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "repeat_last_n": "penalty_last_n",
}
RENAMED: Final[Mapping[str, str]] = {  # what it calls them, to what they are
    "typ_p": "typical_p",
    "thinking_budget_tokens": "thinking_token_budget",
    "reasoning_budget_tokens": "thinking_token_budget",
}
BUDGETS: Final = ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens")
LIMITS: Final = ("max_tokens", "max_completion_tokens")  # n_predict, of which -1 is none
LAST_N: Final = 64  # tokens that its penalties count, unless told otherwise
SAMPLERS: Final = (  # in the order in which they are applied here
    *("dry", "penalties", "temperature", "top_n_sigma", "min_p", "top_k", "typical_p", "top_p"),
    "xtc",
)
INFILL: Final = "infill"  # comes behind them where it is asked for
ADAPTIVE: Final = "adaptive_p"  # the last one, wherever a list has it
OFF: Final[Mapping[str, Mapping[str, Any]]] = {  # as if a sampler was not there
    "dry": {"dry_multiplier": 0.0},
    "penalties": {
        **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    },
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "min_p": {"min_p": 0.0},
    "top_k": {"top_k": None},
    "typical_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "xtc": {"xtc_probability": 0.0},
    ADAPTIVE: {"adaptive_target": None},
}
OTHER_NAMES: Final[Mapping[str, str]] = {
    **{"typ_p": "typical_p", "typ": "typical_p", "typical": "typical_p"},
    **{"temp": "temperature", "nucleus": "top_p"},
}
LETTERS: Final[Mapping[str, str]] = {
    **{"d": "dry", "e": "penalties", "t": "temperature", "s": "top_n_sigma", "m": "min_p"},
    **{"k": "top_k", "y": "typical_p", "p": "top_p", "x": "xtc", "i": INFILL},
    "a": ADAPTIVE,
}
NEVER_THE_LIKELIEST: Final = {"top_n_sigma", "min_p", "top_k", "top_p"}  # is what these leave out
MOST_SAMPLERS = 64  # of a list
MOST_LORAS: Final = 256


class LoraScale(Strict):
    """What an adapter is times, which is named by its number."""

    id: Annotated[int, Field(ge=0, lt=2**31)]
    scale: Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)]


LoraScales = Annotated[list[LoraScale], Field(max_length=MOST_LORAS, fail_fast=True)]


class LlamaCppFields(FormFields):
    """llama.cpp's fields; `told` has made of most of them what they are called elsewhere."""

    n_predict: int | None = None
    n_probs: int | None = None
    repeat_penalty: float | None = None
    penalty_last_n: int | None = None
    samplers: list[str] | str | None = None
    timings_per_token: bool | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None  # of place alone
    lora: LoraScales | None = None
    typ_p: float | None = None  # typical_p, as the list of samplers and its web UI call it
    return_progress: bool | None = None
    sse_ping_interval: Annotated[int, Field(ge=-1, lt=2**31)] | None = None

    @property
    def tells_progress(self) -> bool:
        """Whether a stream tells how much of the prompt is computed."""
        return bool(self.return_progress and self.stream)

    def ping_interval_s(self, default_s: float) -> float:
        """Return after how long a stream tells that it lives, as `sse.respond` has it."""
        return default_s if self.sse_ping_interval is None else max(0.0, self.sse_ping_interval)

    @property
    def has_no_limit(self) -> bool:
        """Whether as many tokens are asked for as there is room for."""
        return self.n_predict == -1

    def called(self, error: RequestError) -> RequestError:
        """Return an error about a field of ours by the name that the client gave it."""
        param = error.param or ""
        names = [name for name, field in RENAMED.items() if field == param]
        for name in (CALLED.get(param, ""), *names):
            if getattr(self, name, None) is not None:
                return RequestError(str(error).replace(param, name), name)
        return error


def told(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """Return a body in which llama.cpp's fields say what they mean by OpenAI's and vLLM's names.

    They stay in it. What is of a wrong type is left to whoever checks that.

    Args:
        body: as it was sent.
        is_chat: whether log probabilities are asked for as chats do.

    Raises:
        RequestError: a value means nothing, or the same field has another one by another name.
    """
    given = {name: value for name, value in body.items() if value is not None}
    means: dict[str, Any] = {}
    if unlimited := [name for name in LIMITS if _int(given.get(name)) == -1]:
        _check_unlimited(unlimited[0], given)
        given = {name: value for name, value in given.items() if name not in unlimited}
        given["n_predict"] = -1
        means = {**dict.fromkeys(unlimited), "n_predict": -1}
    for name, field, value in _meanings(given, is_chat=is_chat):
        if (other := given.get(field, means.get(field, value))) != value:
            raise RequestError(
                f"{name} is {given[name]!r}, as if {field} was {value!r}, and {field} is "
                f"{other!r}{'' if field in given else ' by another name'}; send one of them",
                name,
            )
        means[field] = value
    _check_slot(given.get("id_slot"))
    if given.get("grammar") == "":  # which is none
        means["grammar"] = None
    return {**body, **means}


def _meanings(given: Mapping[str, Any], *, is_chat: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield fields that are given, what they are called elsewhere, and what that is then."""
    predicted, count = _int(given.get("n_predict")), _int(given.get("n_probs"))
    if predicted is not None:
        if predicted < 1 and predicted != -1:
            raise RequestError(
                f"n_predict is {predicted}; ask for 1 token or more, or send -1 for as many as "
                "there is room for",
                "n_predict",
            )
        if predicted == -1 and given.get("max_tokens") is not None:
            raise RequestError(
                f"n_predict is -1, which sets no limit, and max_tokens is {given['max_tokens']!r}; "
                "send one of them",
                "n_predict",
            )
        if predicted != -1:
            yield "n_predict", "max_tokens", predicted
    if count:
        if count < 0:
            raise RequestError(f"n_probs is {count}; send 0 or more", "n_probs")
        yield "n_probs", "top_logprobs" if is_chat else "logprobs", count
        if is_chat:
            yield "n_probs", "logprobs", True
    if (window := _int(given.get("penalty_last_n"))) is not None:
        yield "penalty_last_n", "repeat_last_n", window
    penalty = given.get("repeat_penalty")
    if isinstance(penalty, float) or _int(penalty) is not None:
        yield "repeat_penalty", "repetition_penalty", penalty
        if penalty != 1 and not {"repeat_last_n", "penalty_last_n"} & {*given}:
            yield "repeat_penalty", "repeat_last_n", LAST_N
    renamed = [(name, field) for name, field in RENAMED.items() if name in given]
    if all(given.get(name, -1) == -1 for name in BUDGETS):  # which is the server's
        renamed = [(name, field) for name, field in renamed if name not in BUDGETS]
    for name, field in renamed:
        yield name, field, given[name]
    if given.get("cache_prompt") is False:
        yield "cache_prompt", "skip_reading_prefix_cache", True


def _check_unlimited(name: str, given: Mapping[str, Any]) -> None:
    """Refuse a limit beside one of -1, which is none."""
    limits = [one for one in (*LIMITS, "n_predict") if given.get(one, -1) != -1]
    if limits:
        raise RequestError(
            f"{name} is -1, which sets no limit, and {limits[0]} is {given[limits[0]]!r}; send one "
            "of them",
            name,
        )


def _check_slot(given: Any) -> None:
    """Refuse what can be no slot; any slot says no more than where the prompt may be cached."""
    slot = _int(given)
    if slot is not None and slot < -1:
        raise RequestError(f"id_slot is {slot}; send 0 or more, or -1 for any", "id_slot")


def _int(value: Any) -> int | None:
    """Return a value that is an integer; None if it is not."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def with_samplers(given: Sequence[str] | str, params: SamplingParams) -> SamplingParams:
    """Return the parameters with those samplers alone that a list has, as llama.cpp reads it.

    What it leaves out is not applied, whatever values the request, or the model's authors, have
    for it. With Mirostat, which comes in place of all that leaves tokens out, that is penalties
    and DRY.

    Args:
        given: names in llama.cpp's spelling, or a text of its letters.
        params: of the request.

    Raises:
        RequestError: a name is not known or there twice, or the order is one in which another
            token might be drawn than in ours.
    """
    names = _sampler_names(given)
    left_out = [name for name in OFF if name not in names]
    if params.mirostat:
        left_out = [name for name in left_out if name in ("dry", "penalties")]
    off = {field: value for name in left_out for field, value in OFF[name].items()}
    is_filling = INFILL in names and not params.mirostat
    params = replace(params, **off, infill=is_filling)
    _check_order(names, params)
    return params


def _check_order(names: Sequence[str], params: SamplingParams) -> None:
    """Refuse an order of samplers in which another token might be drawn than is here.

    What changes nothing in this request may stand anywhere.
    """
    ours = (*SAMPLERS, INFILL)
    active = _active(params)
    order = [name for name in names if name in active]
    for number, first in enumerate(order):
        for second in order[number + 1 :]:
            is_ours = ours.index(first) < ours.index(second)
            if not is_ours and not _commute(frozenset((first, second)), params):
                raise RequestError(
                    f"samplers has {first} before {second}, and here the order is "
                    f"{', '.join(ours)}; list them so, or leave samplers out",
                    "samplers",
                )


def _sampler_names(given: Sequence[str] | str) -> list[str]:
    """Return the samplers of a list, by our names."""
    if isinstance(given, str):
        spelled = [LETTERS.get(letter, letter) for letter in given[: MOST_SAMPLERS + 1]]
    else:
        spelled = [name.replace("-", "_") for name in given[: MOST_SAMPLERS + 1]]
    names = [OTHER_NAMES.get(name, name) for name in spelled]
    for number, name in enumerate(names):
        is_known = name in OFF or name == INFILL
        if not is_known or name in names[:number]:
            what = "is there twice" if is_known else "is not known"
            raise RequestError(
                f"samplers has {name[:40]!r}, which {what}; it may have {', '.join(OFF)} and "
                f"{INFILL}, or be a text of the letters {''.join(LETTERS)}",
                "samplers",
            )
    return names


def _active(params: SamplingParams) -> set[str]:
    """Return the samplers that change something."""
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1.0)
    changes = {
        "dry": params.dry_multiplier != 0.0 and params.dry_penalty_last_n != 0,
        "penalties": any(penalties) and params.repeat_last_n != 0,
        "temperature": params.temperature != 1.0 or params.dynatemp_range != 0.0,
        "top_n_sigma": params.top_n_sigma != 0.0,
        "min_p": params.min_p != 0.0,
        "top_k": params.top_k is not None,
        "typical_p": params.typical_p != 1.0,
        "top_p": params.top_p != 1.0,
        "xtc": params.xtc_probability != 0.0 and params.xtc_threshold <= 0.5,
        INFILL: params.infill and not params.greedy,
    }
    found = {name for name, yes in changes.items() if yes}
    if params.mirostat:
        return found & {"dry", "penalties"}  # the temperature is applied whatever the list says
    if params.temperature + params.dynatemp_range == 0.0:
        found -= NEVER_THE_LIKELIEST
    return found


def _commute(two: frozenset[str], params: SamplingParams) -> bool:
    """Whether it makes no difference which of two samplers comes first."""
    if two == {"dry", "penalties"}:
        return params.repetition_penalty == 1.0  # all is subtracted then
    if two in ({"temperature", "top_k"}, {"temperature", "top_n_sigma"}):
        return params.dynatemp_range == 0.0
    return two == {"min_p", "top_k"}
