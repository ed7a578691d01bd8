"""How a request is decoded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxport.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Decoding parameters of one request, with vLLM's names and defaults.

    Attributes:
        temperature: 0 decodes greedily; otherwise logits are divided by it.
        top_p: keep the likeliest tokens whose probabilities add up to at least this, in (0, 1].
        top_k: keep this many of the likeliest tokens; None keeps all.
        seed: makes the request's own tokens reproducible, whatever else is in the batch.
        stop: strings that end the text; the first that appears is cut off.
        stop_token_ids: tokens that end the text, besides the model's own end tokens.
        ignore_eos: go on past the model's end tokens (not past `stop_token_ids`).
        max_tokens: most tokens to generate; None generates up to the context length.
        logprobs: how many of the likeliest tokens to report at each position; 0 reports the
            sampled token alone, None reports nothing.

    Raises:
        RequestError: a value is out of its range; names the parameter.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop: object = self.stop  # a client may give one string, a list or None
        strings = (stop,) if isinstance(stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", strings)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.top_k in (0, -1):  # vLLM's and OpenAI clients' ways to say "all"
            object.__setattr__(self, "top_k", None)
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_integer("top_k", self.top_k, 1, math.inf)
        _check_integer("max_tokens", self.max_tokens, 1, math.inf)
        _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_integer("seed", self.seed, -math.inf, math.inf)
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, math.inf)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError(f"stop is {self.stop!r}; every stop string must be text", "stop")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise RequestError unless low <= value <= high (low < value if `open_low`)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} is {value!r}; it must be in {bracket}{low}, {high}]", name)


def _check_integer(name: str, value: int | None, low: float, high: float) -> None:
    """Raise RequestError unless `value` is None or an integer, low <= value <= high."""
    if value is None:
        return
    if not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; it must be an integer", name)
    _check(name, value, low, high)
