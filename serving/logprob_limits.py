"""How many log probabilities a request may ask for: of one position, and in all."""

from __future__ import annotations

from dataclasses import replace

from onnxport.errors import RequestError
from onnxport.serving.param_ranges import MAX_LOGPROBS
from onnxport.serving.params import SamplingParams

# Of one request, where a position has more of them than usual. Each takes about 300 bytes until it
# is delivered, so this many take 1.2 GiB, and half as much again as JSON.
MOST_LOGPROBS = 1 << 22


def counted(name: str, count: int, limit: int | None, vocab_size: int) -> int:
    """Return how many of the likeliest tokens each position tells.

    Args:
        name: what the client calls the number.
        count: as it gave it; -1 is all tokens.
        limit: the engine's, `EngineConfig.max_logprobs`.
        vocab_size: of the model.

    Raises:
        RequestError: it is no such number, or above the limit.
    """
    if count < -1:
        raise RequestError(f"{name} is {count}; give 0 or more, or -1 for all tokens", name)
    wanted = vocab_size if count == -1 else count
    if limit is not None and wanted > limit:
        what = f", that is all {vocab_size} tokens" if count == -1 else ""
        raise RequestError(
            f"{name} is {count}{what}, and at most {limit} of the likeliest are told here; ask for "
            "fewer, or start the engine with a higher max_logprobs (--max-logprobs; -1 for no "
            "limit)",
            name,
        )
    return min(wanted, vocab_size)


def with_counts(params: SamplingParams, limit: int | None, vocab_size: int) -> SamplingParams:
    """Return parameters whose numbers of log probabilities are those of tokens, not -1.

    Args:
        params: of a request.
        limit: see `counted`.
        vocab_size: likewise.

    Raises:
        RequestError: a number is above the limit.
    """
    given = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    counts = {
        name: None if count is None else counted(name, count, limit, vocab_size)
        for name, count in given.items()
    }
    return params if counts == given else replace(params, **counts)  # type: ignore[arg-type]


def check_total(params: SamplingParams, num_scored: int, num_generated: int) -> None:
    """Refuse more log probabilities than memory should hold at once.

    As many as usual at each position are no matter, however long prompt and output are.

    Args:
        params: of the request, `with_counts`.
        num_scored: tokens of its prompt, or of its prompts, that have some before them.
        num_generated: most tokens that follow; of several completions those of one.

    Raises:
        RequestError: there may be more of them; states the arithmetic.
    """
    places = {
        "prompt_logprobs": (params.prompt_logprobs or 0, num_scored),
        "logprobs": (params.logprobs or 0, num_generated * params.num_sequences),
    }
    if named := len(params.logprob_token_ids or ()):
        count, positions = places.pop("logprobs")
        places["logprobs and logprob_token_ids"] = (count + named, positions)
    many = {name: one for name, one in places.items() if one[0] > MAX_LOGPROBS}
    total = sum(count * positions for count, positions in many.values())
    if total > MOST_LOGPROBS:
        parts = " + ".join(
            f"{count} ({name}) x {positions} tokens" for name, (count, positions) in many.items()
        )
        raise RequestError(
            f"{parts} are {total} log probabilities, and one request may have {MOST_LOGPROBS}; ask "
            "for fewer of each token, or for fewer tokens (max_tokens, a shorter prompt)",
            next(iter(many)).partition(" ")[0],
        )
