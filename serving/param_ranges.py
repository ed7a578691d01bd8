"""What decoding parameters may be, each by itself and together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from onnxport.errors import RequestError
from onnxport.serving.param_checks import check_integer, check_number, check_token, texts_of
from onnxport.serving.text import HALF, is_whole
from onnxport.serving.thoughts import Thought

if TYPE_CHECKING:
    from onnxport.serving.params import SamplingParams

MAX_LOGPROBS = 20  # of one position, unless the engine is told otherwise; OpenAI's and vLLM's
MAX_LOGPROB_TOKEN_IDS = 128  # vLLM's
MAX_COMPLETIONS = 128  # OpenAI's limit of n
MAX_PRIORITY = 2**31
MAX_PENALTY = 2.0  # OpenAI's limit of presence and frequency penalties
MAX_REPETITION = 100.0  # and its inverse the least: beyond, float32 logits could overflow
MAX_BIAS = 100.0  # OpenAI's limit of logit_bias
MAX_BAD_WORDS, MAX_BAD_WORDS_LENGTH = 1024, 32_768  # texts, and characters of all
MAX_SIGMA = 100.0
MAX_LENGTH_PENALTY = 16.0  # and its negative the least: of no length a float overflows
MAX_DRY = 100.0  # of multiplier and base
MAX_DRY_LENGTH = 1 << 20
MAX_DRY_BREAKERS, MAX_DRY_BREAKER = 64, 40  # texts, and characters of each
MAX_DYNATEMP = 100.0  # of range and exponent
MAX_TAU, MAX_ETA = 100.0, 1.0
MAX_DECAY = 0.99
MAX_SCALE = 1000.0  # of an adapter
MAX_LAST_N = 1 << 20  # tokens
MAX_TIMEOUT_S = 30 * 24 * 3600.0


def check_penalties(params: SamplingParams) -> None:
    """Check what changes logits by the tokens of a sequence."""
    check_number(
        "repetition_penalty", params.repetition_penalty, 1 / MAX_REPETITION, MAX_REPETITION
    )
    check_number("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    check_number("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    check_integer("repeat_last_n", params.repeat_last_n, -1, MAX_LAST_N)


def biases_of(
    given: Mapping[int, float] | Iterable[tuple[int, float]] | None,
) -> tuple[tuple[int, float], ...]:
    """Return what is added to logits, as pairs in the order of token ids.

    Raises:
        RequestError: it is no mapping, or a token or number in it is out of range.
    """
    try:
        biases = dict(given or ())
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"logit_bias is {repr(given)[:80]}; give what is added to each token, by token id",
            "logit_bias",
        ) from error
    for token_id, bias in biases.items():
        check_token("logit_bias", token_id)
        if bias != -math.inf:
            check_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    return tuple(sorted(biases.items()))


def check_choices(params: SamplingParams) -> None:
    """Check what forbids tokens."""
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(params.bad_words)} texts; give at most {MAX_BAD_WORDS}",
            "bad_words",
        )
    if (length := sum(map(len, params.bad_words))) > MAX_BAD_WORDS_LENGTH:
        raise RequestError(
            f"bad_words has {length} characters in all; give at most {MAX_BAD_WORDS_LENGTH}",
            "bad_words",
        )
    if params.allowed_token_ids == ():
        raise RequestError(
            "allowed_token_ids is empty, so that nothing could be generated; name a token, or "
            "leave it out to allow all",
            "allowed_token_ids",
        )
    most = math.inf if params.max_tokens is None else params.max_tokens
    check_number("min_tokens", params.min_tokens, 0, math.inf)
    check_integer("min_tokens", params.min_tokens, 0, math.inf)
    if params.min_tokens > most:
        raise RequestError(
            f"min_tokens is {params.min_tokens} and max_tokens is {params.max_tokens}; ask for no "
            "more than may be generated",
            "min_tokens",
        )


def check_left_out(params: SamplingParams) -> None:
    """Check what llama.cpp leaves tokens out by."""
    check_number("top_n_sigma", params.top_n_sigma, 0.0, MAX_SIGMA)
    check_number("typical_p", params.typical_p, 0.0, 1.0, open_low=True)
    check_number("xtc_probability", params.xtc_probability, 0.0, 1.0)
    check_number("xtc_threshold", params.xtc_threshold, 0.0, 1.0)


def check_repetitions(params: SamplingParams) -> None:
    """Check what is said of DRY."""
    check_number("dry_multiplier", params.dry_multiplier, 0.0, MAX_DRY)
    check_number("dry_base", params.dry_base, 1.0, MAX_DRY)
    check_number("dry_allowed_length", params.dry_allowed_length, 0, MAX_DRY_LENGTH)
    check_integer("dry_allowed_length", params.dry_allowed_length, 0, MAX_DRY_LENGTH)
    check_number("dry_penalty_last_n", params.dry_penalty_last_n, -1, MAX_DRY_LENGTH)
    check_integer("dry_penalty_last_n", params.dry_penalty_last_n, -1, MAX_DRY_LENGTH)


def breakers_of(given: Iterable[str] | str | None) -> tuple[str, ...]:
    """Return the texts that end repetitions, for DRY.

    Raises:
        RequestError: one is no whole text, or there are too many, or too long ones.
    """
    name = "dry_sequence_breakers"
    breakers = texts_of(name, given)
    if half := [text for text in breakers if not is_whole(text)]:
        raise RequestError(f"{name} holds {half[0]!r}, which {HALF}", name)
    longest = max(map(len, breakers), default=0)
    if len(breakers) > MAX_DRY_BREAKERS or longest > MAX_DRY_BREAKER:
        raise RequestError(
            f"{name} are {len(breakers)} texts of up to {longest} characters; give at most "
            f"{MAX_DRY_BREAKERS} of {MAX_DRY_BREAKER}",
            name,
        )
    return breakers


def check_adapting(params: SamplingParams) -> None:
    """Check what moves from token to token."""
    check_number("dynatemp_range", params.dynatemp_range, 0.0, MAX_DYNATEMP)
    check_number("dynatemp_exponent", params.dynatemp_exponent, 0.0, MAX_DYNATEMP)
    check_number("mirostat", params.mirostat, 0, 2)
    check_integer("mirostat", params.mirostat, 0, 2)
    check_number("mirostat_tau", params.mirostat_tau, 0.0, MAX_TAU)
    check_number("mirostat_eta", params.mirostat_eta, 0.0, MAX_ETA)
    if params.adaptive_target is not None:
        check_number("adaptive_target", params.adaptive_target, -math.inf, 1.0)
    check_number("adaptive_decay", params.adaptive_decay, 0.0, MAX_DECAY)


def check_thinking(params: SamplingParams) -> None:
    """Check what is said of reasoning."""
    check_integer("thinking_token_budget", params.thinking_token_budget, 0, math.inf)
    thought = params.thought
    if thought is None:
        return
    if not isinstance(thought, Thought):
        raise RequestError(f"thought is {repr(thought)[:80]}; give a Thought", "thought")
    is_begun = thought.is_open or bool(thought.opens)
    if not (is_begun and thought.closes and all((*thought.opens, *thought.closes))):
        raise RequestError(
            f"thought is {repr(thought)[:200]}; name what opens and what closes it, in texts "
            "that are not empty",
            "thought",
        )


def check_beams(params: SamplingParams) -> None:
    """Check what is said of beam search, and that nothing is asked that it cannot do."""
    check_number("length_penalty", params.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if not params.use_beam_search:
        if params.length_penalty != 1.0:
            raise RequestError(
                f"length_penalty is {params.length_penalty} without use_beam_search; it compares "
                "the texts of a beam search. Set use_beam_search to true, or leave it out",
                "length_penalty",
            )
        return
    detection = params.repetition_detection
    chances = {
        "seed": params.seed is not None,
        "top_p": params.top_p < 1.0,
        "top_k": params.top_k is not None,
        "min_p": params.min_p > 0.0,
        "typical_p": params.typical_p < 1.0,
        "top_n_sigma": params.top_n_sigma > 0.0,
        "xtc_probability": params.xtc_probability > 0.0,
        "dynatemp_range": params.dynatemp_range > 0.0,
        "mirostat": params.mirostat != 0,
        "adaptive_target": params.adaptive_target is not None,
        "infill": params.infill,
        "repetition_detection": detection is not None and detection.is_on,
    }
    if given := [name for name, is_given in chances.items() if is_given]:
        raise RequestError(
            f"{given[0]} is {repr(getattr(params, given[0]))[:80]} with use_beam_search, which "
            "looks for the likeliest texts among all, and draws nothing; leave one of them out",
            given[0],
        )
